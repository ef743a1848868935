"""Commands in, events out; events in, state out."""
