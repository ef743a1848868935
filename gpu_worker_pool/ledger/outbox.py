"""Events on their way into the journal: gathered in a turn of the event loop, and written one batch after the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from gpu_worker_pool.core.decider.condense import Condensed
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import EndedLease

from .journal import JournalDamaged, JournalError, NotWritten
from .writer import WriteBatch, Writer

logger = logging.getLogger(__name__)

# The time between attempts to write a failed batch.
RETRY_S = 0.5
# How long events that are not urgent wait for others.
LATE_FLUSH_S = 0.1
# This backs no promise to a client: if it is lost, the next reading brings it about again.
NOT_URGENT = (ev.GpuDrained,)


class Outbox:
    """`on_written` gets each batch once it is written, and `on_recovery` is called after each of them. `condense` gives what
    the whole history adds up to. `trouble` says why the journal cannot be written; then nothing more is sent, apart from
    what has failed.
    """

    def __init__(
        self,
        on_written: Callable[[WriteBatch], None],
        on_recovery: Callable[[], None],
        condense: Callable[[], Condensed],
    ) -> None:
        self.trouble: str | None = "the journal has not been opened yet"
        self.writer: Writer | None = None
        self.write_listeners: list[Callable[[float], None]] = []
        self._on_written = on_written
        self._on_recovery = on_recovery
        self._condense = condense
        self._gathering: WriteBatch | None = None
        self._in_flight: WriteBatch | None = None
        self._unwritten: dict[str, WriteBatch] = {}
        self._is_flush_due = False
        self._late_flush: asyncio.TimerHandle | None = None
        self._held: asyncio.TimerHandle | None = None

    def open(self, writer: Writer) -> None:
        self.writer, self.trouble = writer, None

    def abandon(self, trouble: str) -> None:
        """Send nothing more. What is on its way may be written or not."""
        unfinished = [batch for batch in (self._in_flight, self._gathering) if batch is not None]
        self._in_flight = self._gathering = self.writer = None
        self._cancel_timers()
        self._unwritten.clear()
        self.trouble = trouble
        for batch in unfinished:
            self._refuse(batch)

    def close(self) -> None:
        """Write what is left, and close the journal."""
        self._cancel_timers()
        if self.writer is not None:
            batch, self._gathering = self._gathering, None
            if batch is not None and batch.events and self.trouble is None:
                self.writer.write(batch, lambda *_: None)
            self.writer.close()
            self.writer = None

    def add(self, events: Sequence[ev.Event], ended: Sequence[EndedLease], live: int) -> WriteBatch | None:
        """Take these in, with the leases that they ended; return the batch to wait for before a client is told, if there
        is one. `live` is the number of live leases.
        """
        if self._gathering is None:
            self._gathering = WriteBatch()
        batch = self._gathering
        batch.news += events
        batch.ended += ended
        batch.live = live
        must_wait = False
        for event in events:
            if isinstance(event, ev.DurableEvent):
                batch.events.append(event)
                if not isinstance(event, NOT_URGENT):
                    batch.is_urgent = must_wait = True
                    lease_id = getattr(event, "lease_id", None)
                    if lease_id is not None:
                        self._unwritten[lease_id] = batch
        if not self._is_flush_due:
            # At the end of this turn of the loop, so that all requests of one turn share a commit.
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self.flush)
        return batch if must_wait else None

    def batch_of(self, lease_id: str) -> WriteBatch | None:
        """The last batch with an event of this lease; None if all of them are written."""
        return self._unwritten.get(lease_id)

    def last_batch(self) -> WriteBatch | None:
        """The batch after which all events so far are written, apart from those that are not urgent."""
        return self._gathering if self._gathering is not None and self._gathering.is_urgent else self._in_flight

    def hold(self, most_s: float) -> None:
        """Send nothing until `let_go`: more is about to happen that can share the commit. No longer than this."""
        if self._held is None:
            self._held = asyncio.get_running_loop().call_later(most_s, self.let_go)

    def let_go(self) -> None:
        """Send what was held."""
        if self._held is not None:
            self._held.cancel()
            self._held = None
            self.flush()

    def flush(self) -> None:
        """Send what was gathered, unless it is held, a batch is on its way, or nothing of it is urgent yet."""
        self._is_flush_due = False
        batch = self._gathering
        if batch is None or self._held is not None or self._in_flight is not None:
            return
        if self.writer is None or self.trouble is not None:
            return
        if batch.events and not batch.is_urgent:
            if self._late_flush is None:
                self._late_flush = asyncio.get_running_loop().call_later(LATE_FLUSH_S, self._flush_late)
            return
        self._gathering = None
        if not batch.events:
            self._finish(batch)
            return
        if self.writer.is_compaction_due(batch.live):
            batch.snapshot = self._condense()
        self._in_flight = batch
        self.writer.write(batch, self._done)

    def _flush_late(self) -> None:
        self._late_flush = None
        if self._gathering is not None:
            self._gathering.is_urgent = True
            self.flush()

    def _cancel_timers(self) -> None:
        for timer in filter(None, (self._late_flush, self._held)):
            timer.cancel()
        self._late_flush = self._held = None

    def _done(self, batch: WriteBatch, error: JournalError | None) -> None:
        if batch is not self._in_flight:
            return  # of a writer that was given up
        self._in_flight = None
        if error is not None:
            self._run_into_trouble(batch, error)
            return
        if self.trouble is not None:
            logger.warning("the journal can be written again")
            self.trouble = None
        try:
            self._finish(batch)
        finally:  # a listener that fails keeps nothing else from being written
            self._on_recovery()
            self.flush()
        for listener in self.write_listeners:
            listener(batch.write_s)

    def _finish(self, batch: WriteBatch) -> None:
        for lease_id in [id_ for id_, last in self._unwritten.items() if last is batch]:
            del self._unwritten[lease_id]
        self._on_written(batch)

    def _run_into_trouble(self, batch: WriteBatch, error: JournalError) -> None:
        """Keep this batch and what came after it, and try again. No client is told of either."""
        if self.trouble is None:
            logger.error("nothing can be granted: %s", error)
        self.trouble = str(error)
        later, self._gathering = self._gathering, None
        again = batch.with_later(later)
        for lease_id in self._unwritten:
            self._unwritten[lease_id] = again
        again.replaces_damaged = isinstance(error, JournalDamaged)
        if again.replaces_damaged or batch.snapshot is not None:
            again.snapshot = self._condense()  # the state in memory has all of it
        self._in_flight = again
        asyncio.get_running_loop().call_later(RETRY_S, self._try_again, again)
        for failed in filter(None, (batch, later)):
            self._refuse(failed)

    def _try_again(self, batch: WriteBatch) -> None:
        if self.writer is not None and batch is self._in_flight:
            self.writer.write(batch, self._done)

    def _refuse(self, batch: WriteBatch) -> None:
        for caller in batch.callers:
            if not caller.done():
                caller.set_exception(NotWritten(self.trouble))
                caller.exception()  # retrieved: the caller may be gone
