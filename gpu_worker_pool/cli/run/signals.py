"""See jobs/signals.py; for `batch` and `submit` as they are."""

from gpu_worker_pool.jobs.signals import ENDING, Received, Signals, has_controlling_terminal

__all__ = ["ENDING", "Received", "Signals", "has_controlling_terminal"]
