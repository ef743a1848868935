"""Tells others of what happened: by a webhook, a program, or a mail."""
