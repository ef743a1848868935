"""The nouns: GPUs, requests, leases, commands, events, and the state they add up to."""
