"""What ended leases came to, read beside the writer of a journal."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Container, Iterator
from contextlib import closing, contextmanager
from math import inf
from pathlib import Path
from typing import Any

from gpu_worker_pool.core.accounting.timeline import Timeline
from gpu_worker_pool.core.accounting.usage import LeaseTimes, UsageAccount
from gpu_worker_pool.ledger.codec import decode_ended
from gpu_worker_pool.ledger.faults import journal_errors
from gpu_worker_pool.ledger.journal import JournalDamaged

from .queries import load_queries

# After so many leases whoever waits for the interpreter has his turn, for so long: a long account delays nobody.
LEASES_AT_ONCE = 200
BODIES_AT_ONCE = 25
PAUSE_S = 0.0002
BUSY_TIMEOUT_S = 1.0


class Accounts:
    """The ended leases of a journal's file, by a connection of its own that only reads: the writer does not wait for it.

    All calls block, so that they belong into a thread; any number may be made at once, and from any process.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._sql = load_queries()

    def count(
        self, begin: Callable[[], UsageAccount], *, but_for: Container[str] = ()
    ) -> tuple[UsageAccount, float | None]:
        """Add all ended leases but these to the account that `begin` makes, which is called when it is settled what is
        read, so that nothing of it ended after the account's now. Also since when (seconds since 1970) what is known
        of ended leases is complete, None where nothing was ever taken away. JournalError where it cannot be read.
        """
        with self._one_moment() as (connection, complete_since):
            account = begin()
            until = inf if account.until is None else account.until
            rows = connection.execute(self._sql["read_ended_within"], (account.since, until, until, until))
            for lease_id, owner, gpu_count, is_shared, requested_at, granted_at, ended_at in _in_chunks(rows):
                if lease_id not in but_for:
                    account.count(LeaseTimes(owner, gpu_count, bool(is_shared), requested_at, granted_at, ended_at))
        return account, complete_since

    def trace(self, begin: Callable[[], Timeline], *, but_for: Container[str] = ()) -> tuple[Timeline, float | None]:
        """Note all ended leases but these, the last one first, in the timeline that `begin` makes; else as `count`."""
        with self._one_moment() as (connection, complete_since):
            timeline = begin()
            within = (timeline.since, timeline.now)
            for (lease_id,) in _in_chunks(connection.execute(self._sql["read_unknown_within"], within)):
                timeline.unknown_leases += lease_id not in but_for
            for lease_id, body in _in_chunks(connection.execute(self._sql["read_held_within"], within), BODIES_AT_ONCE):
                if timeline.is_cut:
                    break
                if lease_id not in but_for:
                    try:
                        timeline.add(decode_ended(body))
                    except ValueError as error:
                        raise JournalDamaged(f"the journal {self._path} is damaged: {error}") from error
        return timeline, complete_since

    @contextmanager
    def _one_moment(self) -> Iterator[tuple[sqlite3.Connection, float | None]]:
        """All in one transaction, which is one moment of the file: from here on nothing new is seen, nothing pruned."""
        with journal_errors(self._path), closing(self._connect()) as connection:
            connection.execute("BEGIN")
            (complete_since,) = connection.execute(self._sql["complete_since"]).fetchone()
            yield connection, None if complete_since is None else float(complete_since)

    def _connect(self) -> sqlite3.Connection:
        # mode=ro: it must neither make a file nor, on closing, fold the writer's log into it.
        return sqlite3.connect(f"{self._path.as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)

    def __repr__(self) -> str:
        return f"<Accounts {self._path}>"


def _in_chunks(rows: sqlite3.Cursor, at_once: int = LEASES_AT_ONCE) -> Iterator[Any]:
    while some := rows.fetchmany(at_once):
        yield from some
        time.sleep(PAUSE_S)
