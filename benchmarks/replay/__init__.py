"""A trace of a real GPU cluster, replayed through the core in simulated time."""
