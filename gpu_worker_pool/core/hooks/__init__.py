"""Hooks: who is told of what happens to leases and nodes, and how often that is tried."""
