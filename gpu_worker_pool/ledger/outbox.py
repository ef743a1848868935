"""Events on their way into the journal: gathered in a turn of the event loop, and written one batch after the other."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from gpu_worker_pool.core.decider.condense import condense
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.core.model.state import PoolState

from .journal import Journal, JournalDamaged, JournalError, NotWritten

logger = logging.getLogger(__name__)

# The time between attempts to write a failed batch.
RETRY_S = 0.5
# This backs no promise to a client: if it is lost, the next reading brings it about again. It waits for others, or a tick.
NOT_URGENT = (ev.GpuDrained,)
# What these say of a lease changes nothing that its client is told, so it may be told of the lease before they are written.
UNTOLD = (ev.GpuDrained, ev.ProcessesAttributed)
# A history this short replays at once, even if little of it is still needed.
SHORTEST_TO_COMPACT = 20_000
# The same in bytes: few events may be large ones.
SMALLEST_TO_COMPACT = 32 * 1024 * 1024
BYTES_PER_LEASE = 4096

Answer = asyncio.Future[list[ev.Event]]


@dataclass(eq=False, slots=True)
class WriteBatch:
    """What one commit writes: `events`, and the leases that they `ended`, for the accounting.

    `news` is all that happened, in order: listeners get it after the commit, and `callers` their part of it. Before that,
    no client may be told of `lease_ids`. `is_urgent` is set if the commit should not wait. `snapshot` is what the whole
    history adds up to after this batch, if the journal is to be compacted to it, or replaced because it is damaged.
    """

    news: list[ev.Event] = field(default_factory=list)
    events: list[ev.DurableEvent] = field(default_factory=list)
    ended: list[EndedLease] = field(default_factory=list)
    lease_ids: set[str | None] = field(default_factory=set)
    callers: dict[Answer, list[ev.Event]] = field(default_factory=dict)
    is_urgent: bool = False
    snapshot: Sequence[ev.DurableEvent] | None = None
    replaces_damaged: bool = False


Done = Callable[[WriteBatch, JournalError | None], None]


class Writer(Protocol):
    """Writes one batch after the other, and reports the outcome in the event loop's thread."""

    def write(self, batch: WriteBatch, done: Done) -> None:
        """Write a batch; the caller gives the next one only after `done`."""

    def is_compaction_due(self, live: int) -> bool:
        """Whether the history is long compared with what it adds up to: that many live leases."""

    def close(self) -> None:
        """Finish the current batch and close the journal."""


class Outbox:
    """`on_written` gets each batch once it is written, and `write_listeners` the seconds that it took. `trouble` says why
    nothing can be written; then nothing is sent but the batch that has failed, again and again.
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
        self._held: asyncio.TimerHandle | None = None

    def open(self, writer: Writer, state: PoolState) -> None:
        """Write to this journal. The state is what its history adds up to, with all that is gathered."""
        self.writer, self._state, self.trouble = writer, state, None

    def abandon(self, trouble: str) -> None:
        """Send nothing more. What is on its way may be written or not."""
        self.writer, self.trouble = None, trouble
        self._refuse_callers()
        self._in_flight, self._gathering = None, WriteBatch()

    def close(self) -> None:
        """Write what is left, and close the journal."""
        if self.writer is not None:
            if self._gathering.events and self.trouble is None:
                self.writer.write(self._gathering, lambda *_: None)
            self.writer.close()
        self.writer, self.trouble = None, "the server is stopping"

    def add(self, events: Sequence[ev.Event], ended: Sequence[EndedLease]) -> WriteBatch | None:
        """Take these in, with the leases that they ended. Return the batch to wait for before a client is told, if any."""
        batch, must_wait = self._gathering, False
        batch.news += events
        batch.ended += ended
        for event in events:
            if isinstance(event, ev.DurableEvent):
                batch.events.append(event)
                if not isinstance(event, NOT_URGENT):
                    batch.is_urgent = must_wait = True
                if not isinstance(event, UNTOLD):
                    batch.lease_ids.add(getattr(event, "lease_id", None))
        return batch if must_wait else None

    def batch_of(self, lease_id: str | None) -> WriteBatch | None:
        """The last batch with an event of this lease, or of any that is urgent; None if all of them are written."""
        for batch in (self._gathering, self._in_flight):
            if batch is not None and (batch.is_urgent if lease_id is None else lease_id in batch.lease_ids):
                return batch
        return None

    def is_written(self, lease_id: str) -> bool:
        return self.batch_of(lease_id) is None

    def begun_or_ended(self) -> set[str]:
        """The leases that began or ended by what is not written."""
        batches = (self._in_flight, self._gathering)
        events = [event for batch in batches if batch is not None for event in batch.events]
        return {event.lease_id for event in events if isinstance(event, ev.LeaseEnded)}.union(ev.new_leases(events))

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

    def hurry(self) -> None:
        """Let what is not urgent wait no longer than until the next `flush`."""
        self._gathering.is_urgent = bool(self._gathering.events)

    def flush(self) -> None:
        """Send what was gathered, unless it is held, a batch is on its way, or nothing of it is urgent."""
        batch = self._gathering
        if self.writer is None or self.trouble is not None or self._held is not None or self._in_flight is not None:
            return
        if batch.is_urgent:
            if self.writer.is_compaction_due(len(self._state.leases)):
                batch.snapshot = condense(self._state)
            self._in_flight, self._gathering = batch, WriteBatch()
            self._send(batch)
        elif batch.news and not batch.events:
            self._gathering = WriteBatch()
            self._on_written(batch)

    def _send(self, batch: WriteBatch) -> None:
        if self.writer is not None and batch is self._in_flight:
            self._sent_at = time.perf_counter()
            self.writer.write(batch, self._done)

    def _done(self, batch: WriteBatch, error: JournalError | None) -> None:
        if batch is not self._in_flight:
            return  # of a writer that was given up
        if error is not None:
            self._run_into_trouble(batch, error)
            return
        self._in_flight = None
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
        """Try this batch again, with what came after it behind it. No client is told of either."""
        if self.trouble is None:
            logger.error("nothing can be granted: %s", error)
        self.trouble = str(error)
        self._refuse_callers()
        if isinstance(error, JournalDamaged):
            later = self._gathering
            batch.snapshot, batch.replaces_damaged = condense(self._state), True  # it has what came after as well
            batch.events, batch.ended = batch.events + later.events, batch.ended + later.ended
            later.events, later.ended, later.is_urgent = [], [], False
        asyncio.get_running_loop().call_later(RETRY_S, self._send, batch)

    def _refuse_callers(self) -> None:
        for batch in filter(None, (self._in_flight, self._gathering)):
            for caller in batch.callers:
                if not caller.done():
                    caller.set_exception(NotWritten(self.trouble))
                    caller.exception()  # retrieved: the caller may be gone


class WriterThread:
    """The one thread that writes to a journal on disk. While it waits for the disk, the next batch gathers."""

    def __init__(self, journal: Journal, loop: asyncio.AbstractEventLoop) -> None:
        self._journal = journal
        self._loop = loop
        self._orders: queue.SimpleQueue[tuple[WriteBatch, Done] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="journal-writer", daemon=True)
        self._thread.start()

    def write(self, batch: WriteBatch, done: Done) -> None:
        self._orders.put((batch, done))

    def is_compaction_due(self, live: int) -> bool:
        return is_long(self._journal, live)  # the number may be one batch behind, which is harmless

    def close(self) -> None:
        self._orders.put(None)
        self._thread.join()
        self._journal.close()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            batch, done = order
            error = write(self._journal, batch)
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(done, batch, error)


def write(journal: Journal, batch: WriteBatch) -> JournalError | None:
    """Write a batch, and compact the journal if that is due; return why it failed, if it did. What is written leaves it."""
    try:
        if batch.replaces_damaged and batch.snapshot is not None:
            journal.replace_damaged(batch.snapshot)
            # Only the accounting is missing now; a failure must not quarantine the new journal as well.
            batch.events, batch.snapshot, batch.replaces_damaged = [], None, False
        journal.append(batch.events, batch.ended)
        batch.events, batch.ended = [], []
        if batch.snapshot is not None:
            try:
                journal.compact(batch.snapshot)
            except JournalDamaged:
                raise
            except JournalError as error:  # nothing has changed, so it only costs disk space
                logger.warning("the journal could not be compacted: %s", error)
    except JournalError as error:
        return error
    except Exception as error:
        # After any failure, what is not known to be written must not count as written.
        logger.exception("writing to the journal failed")
        return JournalError(f"writing to the journal failed: {error!r}; the server's log says more")
    return None


def is_long(journal: Journal, live: int) -> bool:
    is_large = journal.bytes_since_compaction > max(SMALLEST_TO_COMPACT, BYTES_PER_LEASE * live)
    return is_large or journal.events_since_compaction > max(SHORTEST_TO_COMPACT, 8 * live)
