"""Leases for programs of others: each file is for one of them, and is loaded only by its users."""
