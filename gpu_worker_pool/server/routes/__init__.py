"""The routes of the server, by subject."""
