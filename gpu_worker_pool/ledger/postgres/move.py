"""Copies the journal of a leader from its file to a database. The leases, their order and the accounting go on there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from uuid import uuid4

from gpu_worker_pool.core.fleet.leadership import BEGINNING
from gpu_worker_pool.core.model.events import DurableEvent
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.ledger.journal import JournalError

from .database import SNAPSHOT_TIMEOUT_S, PostgresDatabase

# Ended leases that are written at once.
AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class JournalCopy:
    """What goes to the database. `mark` names this copy: it is copied once. The epoch is the highest that boxes have seen."""

    pool_id: str
    mark: str
    epoch: int
    events: Sequence[DurableEvent]
    complete_since: float | None


async def move_to(url: str, pool: str | None, copy: JournalCopy, ended: Iterable[EndedLease]) -> str:
    """Copy a journal to a pool that has none, or find that this was done already. Return the URL without its password.

    JournalError if the pool is in use, or the database cannot be written. Only the last statement makes the copy count: one
    that was broken off may be tried again.
    """
    database = PostgresDatabase(url, pool, command_timeout_s=SNAPSHOT_TIMEOUT_S)
    try:
        await database.open()
        row = await database.read_leader()
        if row.end != BEGINNING or row.expires_in_s > 0:
            if row.holder == copy.mark and database.pool_id == copy.pool_id:
                return str(database)
            raise JournalError(
                f"the database {database} has a pool already, with {row.end.position} events; name another database, or another "
                "pool in it with GPU_POOL_FLEET_POOL"
            )
        await database.name_pool(copy.pool_id, copy.complete_since)
        term = uuid4().hex
        row_of_copy = await database.claim(term, copy.mark, "", copy.epoch)
        if row_of_copy is None:
            raise _is_led(database)
        epoch = row_of_copy.epoch
        rest = iter(ended)
        while some := list(islice(rest, AT_ONCE)):
            if await database.append(epoch, term, BEGINNING, uuid4().hex, (), some) is None:
                raise _is_led(database)
        if await database.append(epoch, term, BEGINNING, uuid4().hex, copy.events, ()) is None:
            raise _is_led(database)
        await database.hand_over(epoch, term)
        return str(database)
    finally:
        await database.close()


def _is_led(database: PostgresDatabase) -> JournalError:
    return JournalError(f"another server leads the pool in the database {database}; stop it first")
