"""The journal of a fleet in PostgreSQL. It needs asyncpg, which the extra `fleet` brings; nothing else of this package
does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.ledger.journal import JournalError

if TYPE_CHECKING:
    from .database import PostgresDatabase


def make_database(url: str, pool: str | None = None) -> PostgresDatabase:
    """The database of a fleet, not yet opened. A JournalError says what is wrong with the URL, or what to install."""
    try:
        from .database import PostgresDatabase  # noqa: PLC0415 - asyncpg may not be installed
    except ModuleNotFoundError as error:
        if error.name != "asyncpg":
            raise
        raise JournalError("a fleet needs asyncpg: pip install 'gpu-worker-pool[fleet]'") from None
    return PostgresDatabase(url, pool)
