"""The journal in a SQLite file."""

from .journal import SqliteJournal

__all__ = ["SqliteJournal"]
