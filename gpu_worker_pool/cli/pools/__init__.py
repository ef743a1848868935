"""What the servers answer, and how the commands put it."""
