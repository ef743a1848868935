"""Writes the batches of a leader to the database of its fleet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING
from uuid import uuid4

from gpu_worker_pool.core.fleet.election import Election
from gpu_worker_pool.core.fleet.following import Following
from gpu_worker_pool.core.fleet.leadership import Append, Deposed, JournalEnd, judge_append
from gpu_worker_pool.core.model.events import DurableEvent

from .journal import JournalError, OutcomeUnknown
from .outbox import Done, WriteBatch

if TYPE_CHECKING:
    from .postgres.database import PostgresDatabase

logger = logging.getLogger(__name__)

# The time between two attempts to learn what became of an append.
TRY_AGAIN_S = 0.1


class FleetWriter:
    """The journal of one leadership. An append is tried, with the same id, until its outcome is known or the leadership
    is over: then `step_down` is called with the reason, and nothing more is reported.
    """

    def __init__(
        self,
        database: PostgresDatabase,
        election: Election,
        following: Following,
        clock: Callable[[], float],
        step_down: Callable[[str], None],
    ) -> None:
        if election.leadership is None:
            raise ValueError("only a leader writes")
        self._database = database
        self._election = election
        self._following = following
        self._clock = clock
        self._step_down = step_down
        self._epoch, self._term = election.leadership.epoch, election.leadership.term
        self._writing: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._is_closed = False
        # Why the last append failed; it may have been carried out on a later attempt.
        self.trouble: str | None = None

    def write(self, batch: WriteBatch, done: Done) -> None:
        self._writing = asyncio.get_running_loop().create_task(self._write(self._writing, batch, done))

    def is_compaction_due(self, live: int) -> bool:  # noqa: ARG002 - what a snapshot costs, followers pay
        """Whether a snapshot is so long overdue that no follower seems to write any, nor does this one."""
        if self._keeping is not None and not self._keeping.done():
            return False
        return self._following.is_snapshot_due(is_leader=True)

    def close(self) -> None:
        """Report nothing more. A batch that is being written is finished: see `finish`."""
        self._is_closed = True

    async def finish(self, timeout_s: float) -> None:
        """Wait until the last batch is written, or until the timeout."""
        if self._writing is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._writing), timeout_s)

    async def _write(self, before: asyncio.Task[None] | None, batch: WriteBatch, done: Done) -> None:
        if before is not None and not before.done():
            await asyncio.wait([before])  # the last one of a server that stops
        try:
            is_written = await self._appended(batch, self._following.end)
        except JournalError as error:
            if not self._is_closed and self._is_mine():
                done(batch, error)
            return
        except Exception as error:
            # After any failure, what is not known to be written must not count as written.
            logger.exception("writing to the journal failed")
            self._give_up(f"writing to the journal failed: {error}")
            return
        if is_written:
            self.trouble = None
            if batch.snapshot is not None:
                keeping = self._keep(self._following.end, batch.snapshot)
                self._keeping = asyncio.get_running_loop().create_task(keeping)
            if not self._is_closed:
                done(batch, None)

    async def _keep(self, end: JournalEnd, snapshot: Sequence[DurableEvent]) -> None:
        try:
            await self._database.write_snapshot(end, snapshot)
        except JournalError as error:
            logger.warning("no snapshot of the journal could be written: %s", error)
        except Exception:  # a snapshot only shortens the next start: whatever its fault is, the leader goes on
            logger.exception("no snapshot of the journal could be written")
        else:
            self._following.snapshot_known(end.position)

    async def _appended(self, batch: WriteBatch, end: JournalEnd) -> bool:
        """Append until the outcome is known; return whether it is written. If not, the leadership is over. A JournalError
        if it is certain that nothing was written, and the leadership goes on: after a full disk, for example.
        """
        append = Append(self._epoch, self._term, end, str(uuid4()), len(batch.events))
        first_sent_at, is_unknown = self._clock(), False
        while self._is_leading():
            sent_at = self._clock()
            outcome: JournalEnd | Deposed | None = None
            try:
                outcome = await self._database.append(
                    append.epoch, append.term, append.end, append.batch, batch.events, batch.ended
                )
            except JournalError as error:
                self.trouble = str(error)
                is_unknown = is_unknown or isinstance(error, OutcomeUnknown)
                if not is_unknown:
                    raise
            if outcome is None:
                # Any of the attempts may have been carried out, so the leadership may end as early as after the first.
                sent_at, outcome = first_sent_at, await self._judge(append)
            if not self._is_mine():
                # The pool in memory is no longer the one that this was decided on: the journal tells what became of it.
                return False
            if isinstance(outcome, Deposed):
                self._give_up(outcome.reason)
                return False
            if outcome is not None:
                self._election.appended(self._epoch, self._term, sent_at)
                self._following.written(outcome, self._epoch)
                return True
            await asyncio.sleep(TRY_AGAIN_S)
        return False

    def _is_leading(self) -> bool:
        return self._is_mine() and self._election.is_trusted(self._clock())

    def _is_mine(self) -> bool:
        now = self._election.leadership
        return now is not None and (now.epoch, now.term) == (self._epoch, self._term)

    def _give_up(self, reason: str) -> None:
        """Step down, unless that is done already: the same candidate may lead again, with another writer."""
        if self._is_mine():
            self._step_down(reason)

    async def _judge(self, append: Append) -> JournalEnd | Deposed | None:
        try:
            return judge_append(append, await self._database.read_leader())
        except JournalError as error:
            self.trouble = str(error)
            return None
