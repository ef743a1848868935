"""Hand out GPUs so that nobody collides: no other worker, process, user or machine."""

__version__ = "1.0.0"
