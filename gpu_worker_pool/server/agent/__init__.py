"""This box as a part of a fleet: it keeps its leases, and tells the leader what happens to them."""
