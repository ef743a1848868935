"""The tables of a fleet's journal, their version, and the pools in them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from secrets import token_hex
from typing import Any

from gpu_worker_pool.host.state_dir import reach
from gpu_worker_pool.ledger.journal import JournalError, JournalTooNew
from gpu_worker_pool.ledger.sql import VERSION, load_queries, load_schema

from .hosts import RawConnection
from .url import DatabaseUrl

logger = logging.getLogger(__name__)

# The name of the first pool in a database, if it gets no other.
FIRST_POOL = "pool"
LONGEST_NAME = 100
OLDEST_SERVER = 12


async def prepare(raw: RawConnection, url: DatabaseUrl, wanted: str | None) -> tuple[str, str]:
    """Create the tables, choose the pool or create it, and return its name and identity.

    A database that is ready is only read, so a role without the right to create anything can use it.
    """
    check_server(raw, url)
    sql = load_queries(__package__)
    if await read_version(raw, url):
        found = _chosen(await raw.fetch(sql["read_pools"]), url, wanted)
        if found is not None:
            return found
    async with raw.transaction():
        # A candidate that stops here must not keep the others from starting.
        await raw.execute("SET LOCAL idle_in_transaction_session_timeout = '10s'")
        await raw.execute(sql["lock_creation"])
        if not await read_version(raw, url):
            await raw.execute(load_schema(__package__))
        reach("in_creation")
        pools = await raw.fetch(sql["read_pools"])
        found = _chosen(pools, url, wanted)
        if found is None:
            found = (wanted or FIRST_POOL, token_hex(8))
            await raw.execute(sql["create_pool"], *found)
            await raw.execute(sql["create_leader"], found[0])
            if others := [str(name) for name, _ in pools]:
                logger.warning(
                    "a new pool %r was created in the database %s, beside %s; if you meant another, correct "
                    "GPU_POOL_FLEET_POOL and delete the new one from gpu_pool.pool and gpu_pool.leader",
                    found[0],
                    url,
                    ", ".join(map(repr, others)),
                )
    reach("after_creation")
    return found


def check_server(raw: RawConnection, url: DatabaseUrl) -> None:
    version = raw.get_server_version()
    if version.major < OLDEST_SERVER:
        raise JournalError(
            f"the server of the database {url} is PostgreSQL {version.major}; it must be {OLDEST_SERVER} or newer"
        )
    # Names of owners and machines may have any characters.
    encoding = getattr(raw.get_settings(), "server_encoding", "UTF8")
    if encoding != "UTF8":
        raise JournalError(
            f"the database {url} has the encoding {encoding}; create one with the encoding UTF8 "
            "(createdb --encoding=UTF8 --template=template0)"
        )


async def read_version(raw: RawConnection, url: DatabaseUrl) -> int:
    """The version of the tables, 0 if there are none; a JournalError if another version of this program made them."""
    sql = load_queries(__package__)
    tables = {str(row[0]) for row in await raw.fetch(sql["read_tables"])}
    if "format" not in tables:
        return 0
    version = int(await raw.fetchval(sql["read_version"]) or 0)
    if version != VERSION:
        raise JournalTooNew(
            f"the pool in the database {url} was written by a newer version of this program (its tables are of version "
            f"{version}, this one knows {VERSION}): install the newer one on this machine as well"
        )
    return version


def _chosen(pools: Sequence[Any], url: DatabaseUrl, wanted: str | None) -> tuple[str, str] | None:
    """The name and identity of the pool to use; None if it must be created."""
    by_name = {str(name): str(pool_id) for name, pool_id in pools}
    if wanted is None and len(by_name) > 1:
        raise JournalError(
            f"the database {url} has several pools ({', '.join(by_name)}): set GPU_POOL_FLEET_POOL to the one that this "
            "machine belongs to"
        )
    name = wanted if wanted is not None else next(iter(by_name), None)
    return None if name not in by_name or name is None else (name, by_name[name])


def check_name(name: str) -> str:
    if not name.strip() or len(name) > LONGEST_NAME or not name.isprintable():
        raise JournalError(
            f"GPU_POOL_FLEET_POOL is {name[: LONGEST_NAME + 1]!r}; it must be a name of 1 to {LONGEST_NAME} printable characters"
        )
    return name
