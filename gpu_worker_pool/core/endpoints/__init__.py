"""Decisions about endpoints: balancing, backoff, circuit breaking."""
