"""Probes: they read the GPUs of this machine."""
