"""The journal of what happened, and the driver: the only code that changes a pool."""
