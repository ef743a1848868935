"""Tells people and programs what happens to leases and nodes: by Apprise, or by a program."""
