"""Decisions about endpoints: balancing, backing off, breaking the circuit."""
