"""The short commands: each asks the servers one thing and shows the answer."""
