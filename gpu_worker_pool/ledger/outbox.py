"""Events on their way into the journal: gathered in a turn of the event loop, and written one batch after the other."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from gpu_worker_pool.core.decider.condense import Condensed
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.core.model.state import PoolState

from .journal import JournalDamaged, JournalError, NotWritten
from .writer import WriteBatch, Writer

logger = logging.getLogger(__name__)

# The time between attempts to write a failed batch.
RETRY_S = 0.5
# This backs no promise to a client: if it is lost, the next reading brings it about again. It waits for others, or a tick.
NOT_URGENT = (ev.GpuDrained,)


class Outbox:
    """`on_written` gets each batch once it is written, and `write_listeners` the seconds that it took. `trouble` says why
    nothing can be written; then nothing is sent but what has failed, again and again.
    """

    def __init__(self, on_written: Callable[[WriteBatch], None]) -> None:
        self.trouble: str | None = "the journal has not been opened yet"
        self.writer: Writer | None = None
        self.write_listeners: list[Callable[[float], None]] = []
        self._on_written = on_written
        self._state = PoolState()
        self._gathering = WriteBatch()
        self._in_flight: WriteBatch | None = None
        self._sent_at = 0.0
        # While it runs, nothing is sent: writes are held, or the next attempt is waited for.
        self._pause: asyncio.TimerHandle | None = None

    def open(self, writer: Writer, state: PoolState) -> None:
        """Write to this journal, which adds up to the state once all is written."""
        self.writer, self._state, self.trouble = writer, state, None

    def abandon(self, trouble: str) -> None:
        """Send nothing more. What is on its way may be written or not."""
        self._end_pause()
        self.writer, self.trouble = None, trouble
        self._refuse(self._in_flight, self._gathering)
        self._in_flight, self._gathering = None, WriteBatch()

    def close(self) -> None:
        """Write what is left, and close the journal."""
        self._end_pause()
        if self.writer is not None:
            if self._gathering.events and self.trouble is None:
                self.writer.write(self._gathering, lambda *_: None)
            self.writer.close()
            self.writer = None
        self.trouble = "the server is stopping"

    def add(self, events: Sequence[ev.Event], ended: Sequence[EndedLease]) -> WriteBatch | None:
        """Take these in, with the leases that they ended; return the batch to wait for before a client is told, if there
        is one.
        """
        batch, must_wait = self._gathering, False
        batch.news += events
        batch.ended += ended
        for event in events:
            if isinstance(event, ev.DurableEvent):
                batch.events.append(event)
                if not isinstance(event, NOT_URGENT):
                    batch.is_urgent = must_wait = True
                    batch.lease_ids.add(getattr(event, "lease_id", None))
        return batch if must_wait else None

    def batch_of(self, lease_id: str) -> WriteBatch | None:
        """The last batch with an event of this lease; None if all of them are written."""
        for batch in (self._gathering, self._in_flight):
            if batch is not None and lease_id in batch.lease_ids:
                return batch
        return None

    def is_written(self, lease_id: str) -> bool:
        return self.batch_of(lease_id) is None

    def last_batch(self) -> WriteBatch | None:
        """The batch after which all events so far are written, apart from those that are not urgent."""
        return self._gathering if self._gathering.is_urgent else self._in_flight

    def hold(self, most_s: float) -> None:
        """Send nothing until `let_go`: more is about to happen that can share the commit. No longer than this."""
        if self._pause is None:
            self._pause = asyncio.get_running_loop().call_later(most_s, self.let_go)

    def let_go(self) -> None:
        """Send what was held."""
        if self._pause is not None and self.trouble is None:
            self._end_pause()
            self.flush()

    def hurry(self) -> None:
        """Let what is not urgent wait no longer than until the next `flush`."""
        self._gathering.is_urgent = bool(self._gathering.events)

    def flush(self) -> None:
        """Send what was gathered, unless it is held, a batch is on its way, or nothing of it is urgent."""
        batch = self._gathering
        if self._pause is not None or self._in_flight is not None or self.trouble is not None:
            return
        if batch.is_urgent:
            self._send()
        elif batch.news and not batch.events:
            self._gathering = WriteBatch()
            self._on_written(batch)

    def _send(self) -> None:
        if self.writer is None:
            return
        self._pause = None
        batch, self._gathering = self._gathering, WriteBatch()
        is_due = batch.replaces_damaged or self.writer.is_compaction_due(len(self._state.leases))
        batch.snapshot = Condensed(self._state) if is_due else None
        self._in_flight, self._sent_at = batch, time.perf_counter()
        self.writer.write(batch, self._done)

    def _done(self, batch: WriteBatch, error: JournalError | None) -> None:
        if batch is not self._in_flight:
            return  # of a writer that was given up
        self._in_flight = None
        if error is not None:
            self._run_into_trouble(batch, error)
            return
        if self.trouble is not None and self.writer is not None:
            logger.warning("the journal can be written again")
            self.trouble = None
        for listener in self.write_listeners:
            listener(time.perf_counter() - self._sent_at)
        try:
            self._on_written(batch)
        finally:  # a listener that fails keeps nothing else from being written
            self.flush()

    def _run_into_trouble(self, batch: WriteBatch, error: JournalError) -> None:
        """Keep this batch and what came after it, and try again. No client is told of either."""
        if self.trouble is None:
            logger.error("nothing can be granted: %s", error)
        self.trouble = str(error)
        later, self._gathering = self._gathering, batch
        self._refuse(batch, later)
        batch.news += later.news
        batch.events += later.events
        batch.ended += later.ended
        batch.lease_ids |= later.lease_ids
        batch.replaces_damaged = isinstance(error, JournalDamaged)
        self._end_pause()
        self._pause = asyncio.get_running_loop().call_later(RETRY_S, self._send)

    def _end_pause(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None

    def _refuse(self, *batches: WriteBatch | None) -> None:
        for caller in [caller for batch in batches if batch is not None for caller in batch.callers]:
            if not caller.done():
                caller.set_exception(NotWritten(self.trouble))
                caller.exception()  # retrieved: the caller may be gone
