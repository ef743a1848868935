"""What answers show: leases, GPUs, the pool and what is planned, as the bodies of the wire."""
