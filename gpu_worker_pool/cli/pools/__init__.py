"""What the servers answer, read and put into the words of the commands."""
