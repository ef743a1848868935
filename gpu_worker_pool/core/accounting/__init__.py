"""Accounting: GPU time by owner, and the times at which leases held GPUs."""
