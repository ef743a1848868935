"""The leadership and the journal of a fleet in PostgreSQL, shared by all candidates."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from gpu_worker_pool.core.fleet.leadership import (
    BEGINNING,
    LEADERSHIP_S,
    JournalEnd,
    JournalSnapshot,
    LeaderRow,
    StoredEvent,
)
from gpu_worker_pool.core.model.events import DurableEvent
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.host.state_dir import reach
from gpu_worker_pool.ledger.accounts import Accounts
from gpu_worker_pool.ledger.codec import NotUnderstood, checked_crc, decode_ended
from gpu_worker_pool.ledger.journal import HistoryChanged, JournalDamaged, JournalTooNew
from gpu_worker_pool.ledger.sql import load_queries

from . import schema
from .accounts import PostgresAccounts
from .connection import DatabaseConnection
from .hosts import RawConnection
from .rows import NotAfter, ended_json, event_lines, pack, read_stored, unpack
from .url import parse_url

logger = logging.getLogger(__name__)

# The leadership is lost without an answer for 2.5 s, so no statement about it may take much of that. A renewal or an append of
# the leader has more time: to connect again costs it more than to wait for a database that is busy.
COMMAND_TIMEOUT_S = 1.0
LEADER_SHARE = 1.5
READ_TIMEOUT_S = 10.0
SNAPSHOT_TIMEOUT_S = 60.0

# Enough for years of accounting; bounds the growth.
MOST_ENDED = 1_000_000
# Forgotten in one transaction.
PRUNED_AT_ONCE = 2000


class PostgresDatabase:
    """Two connections: one for the leadership and appends, one for what takes longer.

    A call raises JournalError if it certainly changed nothing, and OutcomeUnknown if the answer was lost. `pool_id` is the
    identity of the pool: random, made with the journal, and as lasting as that.
    """

    def __init__(
        self,
        url: str,
        pool: str | None = None,
        *,
        leadership_s: float = LEADERSHIP_S,
        command_timeout_s: float = COMMAND_TIMEOUT_S,
        most_ended: int = MOST_ENDED,
    ) -> None:
        self._url = parse_url(url)
        self._wanted = None if pool is None else schema.check_name(pool)
        self._leadership_s = leadership_s
        self._timeout_s = command_timeout_s
        self._most_ended = most_ended
        self._sql = load_queries(__package__)
        self._commands = DatabaseConnection(self._url, self._prepare_commands)
        self._reads = DatabaseConnection(self._url)
        self.pool = ""
        self.pool_id = ""
        # Where the snapshot ends that was loaded last: events that do not go on from there are missing.
        self._loaded = BEGINNING

    async def open(self) -> None:
        """Connect, create the tables, and choose the pool."""

        async def prepare(raw: RawConnection) -> tuple[str, str]:
            return await schema.prepare(raw, self._url, self._wanted)

        self.pool, self.pool_id = await self._reads.change(prepare, SNAPSHOT_TIMEOUT_S)
        await self.read_leader()

    async def name_pool(self, pool_id: str, complete_since: float | None) -> None:
        """Give a pool without events the identity of the one that is copied to it: holders believe only that one."""
        await self._command("name_pool", pool_id, complete_since)
        self.pool_id = pool_id

    async def close(self) -> None:
        await self._commands.close()
        await self._reads.close()

    def accounts(self) -> Accounts:
        """The accounting of this pool, for a thread."""
        return PostgresAccounts(self._url, self.pool)

    # The leadership

    async def read_leader(self) -> LeaderRow:
        row = await self._commands.read(
            lambda raw: raw.fetchrow(self._sql["read_leader"], self.pool, self._leadership_s), self._timeout_s
        )
        if row is None:
            raise self._damaged(f"the pool {self.pool!r} is no longer there")
        return _leader(row)

    async def claim(self, term: str, holder: str, url: str, seen_epoch: int) -> LeaderRow | None:
        """Take the leadership if nobody has it, with an epoch higher than `seen_epoch`; None if it is taken."""
        row = await self._command("claim", self._leadership_s, term, holder, url, seen_epoch)
        return None if row is None else _leader(row)

    async def renew(self, epoch: int, term: str) -> LeaderRow | None:
        """Keep the leadership for longer; None if it is lost."""
        row = await self._command("renew", self._leadership_s, epoch, term, share=LEADER_SHARE)
        return None if row is None else _leader(row)

    async def hand_over(self, epoch: int, term: str) -> None:
        """Let the leadership expire at once, if it is still this one."""
        await self._command("hand_over", epoch, term)

    async def append(  # noqa: PLR0917 - the order is that of the statement
        self,
        epoch: int,
        term: str,
        end: JournalEnd,
        batch: str,
        events: Sequence[DurableEvent],
        ended: Sequence[EndedLease],
    ) -> JournalEnd | None:
        """Write these after `end`, all or none, renew the leadership, and return the new end. None, and nothing is written, if
        epoch, term or end differ; `read_leader` says which.
        """
        lines, new_end = event_lines(events, epoch, end)
        arguments = (epoch, term, *end, *new_end, batch, lines, ended_json(ended))
        reach("before_append")
        row = await self._command("append", self._leadership_s, *arguments, share=LEADER_SHARE)
        if row is None:
            return None
        reach("after_append")
        return new_end

    # The history

    async def read_events(self, after: JournalEnd, most: int) -> list[StoredEvent]:
        """At most this many events after this end, in order and without gaps. Raises JournalDamaged, JournalTooNew, and
        HistoryChanged if the journal does not go on from there: it is another one, or a snapshot has replaced events.
        """
        # The event before the first is read as well, to see that it is the one that is known.
        rows = await self._reads.read(
            lambda raw: raw.fetch(self._sql["read_events"], self.pool, after.position, most + 1), READ_TIMEOUT_S
        )
        if not rows:
            raise self._damaged(f"the pool {self.pool!r} is no longer there")
        try:
            return read_stored(rows, after, most)
        except NotAfter as error:
            if after == self._loaded:
                raise self._damaged(str(error)) from None
            raise self._changed(str(error)) from None
        except NotUnderstood as error:
            raise self._too_new(str(error)) from error
        except ValueError as error:
            raise self._damaged(str(error)) from error

    async def load_snapshot(self) -> JournalSnapshot | None:
        """The newest snapshot that is whole; None if there is none."""
        positions = await self._reads.read(
            lambda raw: raw.fetch(self._sql["snapshot_positions"], self.pool), READ_TIMEOUT_S
        )
        too_new: str | None = None
        for (position,) in positions:
            try:
                snapshot = await self._read_snapshot(position)
            except NotUnderstood as error:
                too_new = f"the snapshot at position {position}: {error}"
                continue  # the events since the one before it may all be known
            if snapshot is not None:
                self._loaded = snapshot.end
                return snapshot
        first = await self._reads.read(lambda raw: raw.fetchval(self._sql["first_position"], self.pool), READ_TIMEOUT_S)
        if positions and first != 1 and too_new is not None:
            raise self._too_new(too_new)
        if positions and first != 1:
            raise self._damaged("no snapshot is whole, and the events before them were pruned")
        self._loaded = BEGINNING
        return None

    async def write_snapshot(self, end: JournalEnd, events: Sequence[DurableEvent]) -> None:
        """Keep what all events up to this end add up to, and prune what an older snapshot covers already. Raises
        HistoryChanged if the journal does not have this end.
        """
        body, body_crc = await asyncio.to_thread(pack, events)

        async def write(raw: RawConnection) -> None:
            async with raw.transaction():
                # One that stops here must not keep another follower from writing one.
                await raw.execute("SET LOCAL idle_in_transaction_session_timeout = '10s'")
                crc = await raw.fetchval(self._sql["crc_at"], self.pool, end.position) if end.position else 0
                if crc != end.crc:
                    raise self._changed(f"event {end.position} is not the one of the snapshot")
                await raw.execute(self._sql["write_snapshot"], self.pool, *end, body, body_crc)
                reach("in_compaction")
                await raw.execute(self._sql["prune_snapshots"], self.pool)
                await raw.execute(self._sql["prune_events"], self.pool)

        await self._reads.change(write, SNAPSHOT_TIMEOUT_S)
        reach("after_compaction")
        while await self._reads.change(self._prune, SNAPSHOT_TIMEOUT_S):
            pass

    async def _prune(self, raw: RawConnection) -> bool:
        """Forget some of the oldest ended leases, if there are too many; whether there were."""
        async with raw.transaction():
            last = await raw.fetchval(self._sql["last_pruned"], self.pool, self._most_ended, PRUNED_AT_ONCE)
            if last is not None:
                await raw.execute(self._sql["note_pruned"], self.pool, last)
                await raw.execute(self._sql["prune_ended"], self.pool, last)
        return last is not None

    async def load_ended(self, most: int) -> tuple[EndedLease, ...]:
        rows = await self._reads.read(
            lambda raw: raw.fetch(self._sql["read_last_ended"], self.pool, most), READ_TIMEOUT_S
        )
        try:
            for body, crc in rows:
                checked_crc(body, crc)
        except ValueError as error:
            raise self._damaged(f"an ended lease: {error}") from error
        try:
            return tuple(decode_ended(body) for body, _ in rows)
        except ValueError as error:
            raise self._too_new(f"an ended lease: {error}") from error

    def __str__(self) -> str:
        """Its URL, without the password."""
        return str(self._url)

    def __repr__(self) -> str:
        return f"<PostgresDatabase {self._url}: {self.pool or 'not open'}>"

    async def _command(self, query: str, *arguments: object, share: float = 1.0) -> Any:
        return await self._commands.change(
            lambda raw: raw.fetchrow(self._sql[query], self.pool, *arguments), share * self._timeout_s
        )

    async def _read_snapshot(self, position: int) -> JournalSnapshot | None:
        """None if it was pruned meanwhile, or is damaged. NotUnderstood if a newer version wrote it."""
        row = await self._reads.read(
            lambda raw: raw.fetchrow(self._sql["read_snapshot"], self.pool, position), SNAPSHOT_TIMEOUT_S
        )
        if row is None:
            return None
        try:
            return JournalSnapshot(
                JournalEnd(position, row["crc"]), await asyncio.to_thread(unpack, row["body"], row["body_crc"])
            )
        except NotUnderstood:
            raise
        except ValueError as error:
            logger.warning(
                "the snapshot at position %d in the database %s is damaged (%s); the one before it is used, with the events "
                "since then",
                position,
                self._url,
                error,
            )
            return None

    async def _prepare_commands(self, raw: RawConnection) -> None:
        if self._reads.server_began != self._commands.server_began:
            self._reads.leave()  # the database failed over: the old server may be silent
        await raw.execute(self._sql["be_durable"])

    def _damaged(self, what: str) -> JournalDamaged:
        return JournalDamaged(
            f"the journal in the database {self._url} is damaged ({what}): restore the database from a backup, or promote a "
            "standby. To begin again without its leases, make sure that no process still uses the GPUs, and set "
            "GPU_POOL_FLEET_POOL to a new name on all candidates"
        )

    def _too_new(self, what: str) -> JournalTooNew:
        return JournalTooNew(
            f"the journal in the database {self._url} was written by a newer version of this program ({what}): install the "
            "newer one on this machine as well. Until then this server does not lead; it keeps the leases on its own GPUs"
        )

    def _changed(self, what: str) -> HistoryChanged:
        return HistoryChanged(
            f"the journal in the database {self._url} does not go on from what this process has read ({what}): it lost "
            "commits, or a snapshot has replaced events; it is read again from its snapshot"
        )


def _leader(row: Any) -> LeaderRow:
    return LeaderRow(
        epoch=row["epoch"],
        term=row["term"],
        holder=row["holder"],
        url=row["url"],
        end=JournalEnd(row["head"], row["crc"]),
        batch=row["batch"],
        expires_in_s=row["expires_in_s"],
        wall_now=row["wall_now"],
    )
