"""Accounting of ended leases, read beside the writer of a journal."""

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

# After this many leases other threads get the interpreter for this long: a long account delays no request.
LEASES_AT_ONCE = 200
BODIES_AT_ONCE = 25
PAUSE_S = 0.0002
BUSY_TIMEOUT_S = 1.0


class Accounts:
    """The ended leases of a journal's file, through a read-only connection of its own: the writer does not wait for it.

    All calls block, so they belong in a thread. Any number may run at once, from any process.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._sql = load_queries()

    def count(
        self, begin: Callable[[], UsageAccount], *, but_for: Container[str] = ()
    ) -> tuple[UsageAccount, float | None]:
        """Add all ended leases except `but_for` to the account that `begin` makes, and return it with the time (seconds
        since 1970) since which the records are complete, None if none was ever removed.

        `begin` is called after the read transaction has started, so no lease in it ended after the account's `now`.
        Raises JournalError if the file cannot be read.
        """
        with self._one_moment() as (connection, complete_since):
            account = begin()
            until = inf if account.until is None else account.until
            rows = connection.execute(self._sql["read_ended_within"], (account.since, until, until, until))
            for lease_id, owner, gpu_count, is_shared, requested, granted, ended, reason in _in_chunks(rows):
                if lease_id not in but_for:
                    times = LeaseTimes(owner, gpu_count, bool(is_shared), requested, granted, ended, end_reason=reason)
                    account.count(times)
        return account, complete_since

    def trace(self, begin: Callable[[], Timeline], *, but_for: Container[str] = ()) -> tuple[Timeline, float | None]:
        """As `count`, for the timeline that `begin` makes; the last lease is added first."""
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
        """One read transaction: later writes and pruning are not seen."""
        with journal_errors(self._path), closing(self._connect()) as connection:
            connection.execute("BEGIN")
            (complete_since,) = connection.execute(self._sql["complete_since"]).fetchone()
            yield connection, None if complete_since is None else float(complete_since)

    def _connect(self) -> sqlite3.Connection:
        # mode=ro: it must not create a file, and closing must not fold the writer's log into it.
        return sqlite3.connect(f"{self._path.as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)

    def __repr__(self) -> str:
        return f"<Accounts {self._path}>"


def _in_chunks(rows: sqlite3.Cursor, at_once: int = LEASES_AT_ONCE) -> Iterator[Any]:
    while some := rows.fetchmany(at_once):
        yield from some
        time.sleep(PAUSE_S)
