"""Writes to the journal: in a thread if writing takes time, else inline."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from gpu_worker_pool.core.decider.condense import Condensed
from gpu_worker_pool.core.model.events import DurableEvent, Event
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.host.pauses import Pauses

from .journal import Journal, JournalDamaged, JournalError

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class WriteBatch:
    """What one commit writes.

    `callers` are answered after the commit.

    `news` is all that happened, in order; listeners get it after the commit. `is_urgent` is set if a client may be told
    of it. `snapshot` is what the whole history adds up to after this batch, if the journal is to be compacted to it.
    `replaces_damaged` says that the snapshot replaces a damaged journal. `live` is the number of live leases after it.
    """

    callers: list[asyncio.Future[None]] = field(default_factory=list)
    is_urgent: bool = False
    events: list[DurableEvent] = field(default_factory=list)
    ended: list[EndedLease] = field(default_factory=list)
    news: list[Event] = field(default_factory=list)
    snapshot: Condensed | None = None
    replaces_damaged: bool = False
    write_s: float = 0.0
    live: int = 0

    def with_later(self, later: WriteBatch | None) -> WriteBatch:
        """A batch with all of this one, then all of a later one, for which no caller waits."""
        parts = (self,) if later is None else (self, later)
        return WriteBatch(
            is_urgent=True,
            events=[event for part in parts for event in part.events],
            ended=[lease for part in parts for lease in part.ended],
            news=[event for part in parts for event in part.news],
        )


Done = Callable[[WriteBatch, JournalError | None], None]


class Writer(Protocol):
    """Writes one batch after the other, and reports the outcome in the event loop's thread."""

    def write(self, batch: WriteBatch, done: Done) -> None:
        """Write a batch; the caller gives the next one only after `done`."""

    def is_compaction_due(self, live: int) -> bool:
        """Whether the history is long compared with what it adds up to."""

    def close(self) -> None:
        """Finish the current batch and close the journal."""


# A history this short replays at once, even if little of it is still needed.
SHORTEST_TO_COMPACT = 20_000
# The same in bytes: few events may be large ones.
SMALLEST_TO_COMPACT = 32 * 1024 * 1024
BYTES_PER_LEASE = 4096


def written(journal: Journal, batch: WriteBatch) -> JournalError | None:
    """Write a batch, and compact the journal if that is due; return why it failed, if it did. What is written is not
    written again with the batch.
    """
    began = time.perf_counter()
    try:
        if batch.replaces_damaged and batch.snapshot is not None:
            journal.replace_damaged(history_of(batch.snapshot))
            # Only the accounting is missing now; a failure must not quarantine the new journal as well.
            batch.events, batch.snapshot, batch.replaces_damaged = [], None, False
        journal.append(batch.events, batch.ended)
        batch.events, batch.ended = [], []
        batch.write_s = time.perf_counter() - began
        if batch.snapshot is not None:
            _compact(journal, batch.snapshot)
    except JournalError as error:
        return error
    except Exception as error:
        # After any failure, what is not known to be written must not count as written.
        logger.exception("writing to the journal failed")
        return JournalError(f"writing to the journal failed: {error!r}; the server's log says more")
    return None


def _compact(journal: Journal, snapshot: Condensed) -> None:
    history = history_of(snapshot)
    try:
        journal.compact(history)
    except JournalDamaged:
        raise
    except JournalError as error:  # nothing has changed, so it only costs disk space
        logger.warning("the journal could not be compacted: %s", error)


def history_of(condensed: Condensed) -> list[DurableEvent]:
    """The short history, made with pauses. Ten thousand leases take 20 ms: call it in a thread."""
    pauses, events = Pauses(), []
    for event in condensed.events():
        events.append(event)
        pauses.yield_if_due()
    return events


def is_long(journal: Journal, live: int, shortest: int = SHORTEST_TO_COMPACT) -> bool:
    if journal.bytes_since_compaction > max(SMALLEST_TO_COMPACT, BYTES_PER_LEASE * live):
        return True
    return journal.events_since_compaction > max(shortest, 8 * live)


class InlineWriter:
    """Writes in the caller's thread, for a journal in memory. Shorter histories are not compacted."""

    def __init__(self, journal: Journal, shortest_to_compact: int = SHORTEST_TO_COMPACT) -> None:
        self._journal = journal
        self._shortest = shortest_to_compact

    def write(self, batch: WriteBatch, done: Done) -> None:
        done(batch, written(self._journal, batch))

    def is_compaction_due(self, live: int) -> bool:
        return is_long(self._journal, live, self._shortest)

    def close(self) -> None:
        self._journal.close()


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
            error = written(self._journal, batch)
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(done, batch, error)
