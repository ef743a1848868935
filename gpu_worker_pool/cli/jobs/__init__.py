"""Detached jobs: `submit` and the commands beside it, and the keeper that waits for GPUs and runs the jobs."""
