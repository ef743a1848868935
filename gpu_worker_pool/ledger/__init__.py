"""The journal of events, and the driver: the only code that changes a live pool."""
