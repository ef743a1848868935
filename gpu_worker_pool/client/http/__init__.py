"""HTTP as the client needs it: without dependencies, bounded in time and size, on one event loop."""
