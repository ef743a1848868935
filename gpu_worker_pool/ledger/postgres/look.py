"""Looks at the database of a fleet without changing it, for `gpu-pool doctor`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from . import schema
from .connection import DatabaseConnection
from .hosts import RawConnection
from .url import parse_url

LIMIT_S = 10.0
# What a candidate does in tables that are there; without tables it must be able to create them.
_RIGHTS = """
SELECT has_table_privilege('gpu_pool.leader', 'UPDATE') AND has_table_privilege('gpu_pool.event', 'INSERT')
   AND has_table_privilege('gpu_pool.snapshot', 'INSERT')
"""
_MAY_CREATE = "SELECT has_database_privilege(current_database(), 'CREATE')"
# The last leader stays in its row when its time is over.
_LEADERS = "SELECT url FROM gpu_pool.leader WHERE url IS NOT NULL AND ($1::text IS NULL OR pool = $1) ORDER BY pool"


@dataclass(frozen=True, slots=True)
class DatabaseFacts:
    """`shown` is the URL without its password. The tables' version is 0 where there are none; `may_write` is whether the
    role may do what a candidate does. `clock_off_s` is how far the database's clock is ahead of ours. `leaders` are the URLs of those that lead, or led last.
    """

    shown: str
    server: str
    version: int
    leaders: Sequence[str]
    may_write: bool
    clock_off_s: float


async def look(url: str, pool: str | None = None) -> DatabaseFacts:
    """What is there, of this pool or of all; JournalError says why nothing could be seen."""
    parsed = parse_url(url)
    connection = DatabaseConnection(parsed)

    async def work(raw: RawConnection) -> DatabaseFacts:
        schema.check_server(raw, parsed)
        version = await schema.read_version(raw, parsed)
        began = time.time()
        told = float(await raw.fetchval("SELECT extract(epoch FROM clock_timestamp())"))
        return DatabaseFacts(
            str(parsed),
            # With its minor number: "15.18 (Debian 15.18-1)".
            str(await raw.fetchval("SHOW server_version")).split()[0],
            version,
            [str(row[0]) for row in await raw.fetch(_LEADERS, pool)] if version else (),
            bool(await raw.fetchval(_RIGHTS if version else _MAY_CREATE)),
            told - (began + time.time()) / 2,
        )

    try:
        return await connection.read(work, LIMIT_S)
    finally:
        await connection.close()
