"""The pure core: decisions as functions of state, command and time. No I/O, no clock, no randomness."""
