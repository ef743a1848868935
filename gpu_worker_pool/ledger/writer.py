"""Who writes to the journal: a thread of its own where writing takes time, nobody where it does not."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from gpu_worker_pool.core.model.events import DurableEvent, Event
from gpu_worker_pool.core.model.lease import EndedLease

from .journal import Journal, JournalError

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class WriteBatch:
    """What is written by one commit. `news` is all that happened, in order, to be told once it is written.

    `snapshot` is what the whole history adds up to after this batch, where the journal is to be compacted to it;
    It is urgent where somebody may be told of it. `replaces_damaged` says that it is to be put in the place of a journal that cannot be used any more.
    """

    written: asyncio.Future[None]
    is_urgent: bool = False
    events: list[DurableEvent] = field(default_factory=list)
    ended: list[EndedLease] = field(default_factory=list)
    news: list[Event] = field(default_factory=list)
    snapshot: list[DurableEvent] | None = None
    replaces_damaged: bool = False
    write_s: float = 0.0


Done = Callable[[WriteBatch, JournalError | None], None]


class Writer(Protocol):
    """Writes one batch after the other, and says in the event loop's thread how it went."""

    def write(self, batch: WriteBatch, done: Done) -> None:
        """Write this one; the next one is given only when this is done."""
        ...

    def is_compaction_due(self, live: int) -> bool:
        """Whether the history has grown long beside what it adds up to."""
        ...

    def close(self) -> None:
        """Finish what was begun, and let go of the journal."""
        ...


# A history this short is replayed in a moment, however little of it is still of use.
SHORTEST_TO_COMPACT = 20_000


def carry_out(journal: Journal, batch: WriteBatch) -> None:
    """Write a batch, blocking."""
    began = time.perf_counter()
    if batch.replaces_damaged and batch.snapshot is not None:
        journal.replace_damaged(batch.snapshot)
        # From here on only the accounting is missing; a failure now must not set the new journal aside as well.
        batch.events, batch.snapshot, batch.replaces_damaged = [], None, False
        journal.append((), batch.ended)
    else:
        journal.append(batch.events, batch.ended)
    batch.write_s = time.perf_counter() - began


def compact(journal: Journal, batch: WriteBatch) -> None:
    """Compact, where it is due; the batch is safe already, so a failure costs nothing but room."""
    if batch.snapshot is not None and not batch.replaces_damaged:
        try:
            journal.compact(batch.snapshot)
        except JournalError as error:
            logger.warning("the journal could not be compacted: %s", error)


def is_long(journal: Journal, live: int, shortest: int = SHORTEST_TO_COMPACT) -> bool:
    """Whether so many events are too many for so many live leases."""
    return journal.events_since_compaction > max(shortest, 8 * live)


class InlineWriter:
    """Writes at once, in the caller's thread: for a journal in memory. What is shorter than this is not compacted."""

    def __init__(self, journal: Journal, shortest_to_compact: int = SHORTEST_TO_COMPACT) -> None:
        self._journal = journal
        self._shortest = shortest_to_compact

    def write(self, batch: WriteBatch, done: Done) -> None:
        """Write and report before returning."""
        try:
            carry_out(self._journal, batch)
        except JournalError as error:
            done(batch, error)
        else:
            compact(self._journal, batch)
            done(batch, None)

    def is_compaction_due(self, live: int) -> bool:
        """As the history says."""
        return is_long(self._journal, live, self._shortest)

    def close(self) -> None:
        """Let go of the journal."""
        self._journal.close()


class WriterThread:
    """The one thread that writes to a journal on disk. While it waits for the disk, the next batch is gathered."""

    def __init__(self, journal: Journal, loop: asyncio.AbstractEventLoop) -> None:
        self._journal = journal
        self._loop = loop
        self._orders: queue.SimpleQueue[tuple[WriteBatch, Done] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="journal-writer", daemon=True)
        self._thread.start()

    def write(self, batch: WriteBatch, done: Done) -> None:
        """Have it written; `done` is called in the loop's thread."""
        self._orders.put((batch, done))

    def is_compaction_due(self, live: int) -> bool:
        """As the history says; the number may be one batch behind, which does not matter."""
        return is_long(self._journal, live)

    def close(self) -> None:
        """Wait for what was begun, and let go of the journal."""
        self._orders.put(None)
        self._thread.join()
        self._journal.close()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            batch, done = order
            try:
                carry_out(self._journal, batch)
            except JournalError as error:
                self._report(done, batch, error)
            except Exception as error:
                # Whatever it was: what is not known to be written must not be taken for written.
                logger.exception("writing to the journal failed")
                self._report(done, batch, JournalError(f"writing to the journal failed: {error}"))
            else:
                self._report(done, batch, None)
                compact(self._journal, batch)

    def _report(self, done: Done, batch: WriteBatch, error: JournalError | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(done, batch, error)
