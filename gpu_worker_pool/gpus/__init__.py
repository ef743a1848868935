"""Probes: they look at the GPUs of this machine and make readings."""
