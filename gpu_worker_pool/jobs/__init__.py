"""Detached jobs: the life of one job, and which of a user's jobs is next."""
