"""Writes batches of events to the journal, in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
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

# A history this short replays at once, even if little of it is still needed.
SHORTEST_TO_COMPACT = 20_000
# The same in bytes: few events may be large ones.
SMALLEST_TO_COMPACT = 32 * 1024 * 1024
BYTES_PER_LEASE = 4096


@dataclass(eq=False, slots=True)
class WriteBatch:
    """What one commit writes.

    `news` is all that happened, in order: listeners get it after the commit, and `callers` their part of it. `events` are
    the durable ones, and `ended` the leases that they ended, for the accounting. No client may be told of `lease_ids`
    before the commit; `is_urgent` is set if it should not wait. `snapshot` is what the whole history adds up to after this
    batch, if the journal is to be compacted to it, or replaced if it is damaged.
    """

    news: list[Event] = field(default_factory=list)
    events: list[DurableEvent] = field(default_factory=list)
    ended: list[EndedLease] = field(default_factory=list)
    lease_ids: set[str | None] = field(default_factory=set)
    callers: dict[asyncio.Future[list[Event]], list[Event]] = field(default_factory=dict)
    is_urgent: bool = False
    snapshot: Condensed | None = None
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
    """Write a batch, and compact the journal if that is due; return why it failed, if it did. What is written is not
    written again with the batch.
    """
    try:
        if batch.replaces_damaged and batch.snapshot is not None:
            journal.replace_damaged(history_of(batch.snapshot))
            # Only the accounting is missing now; a failure must not quarantine the new journal as well.
            batch.events, batch.snapshot, batch.replaces_damaged = [], None, False
        journal.append(batch.events, batch.ended)
        batch.events, batch.ended = [], []
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
    try:
        journal.compact(history_of(snapshot))
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


def is_long(journal: Journal, live: int) -> bool:
    if journal.bytes_since_compaction > max(SMALLEST_TO_COMPACT, BYTES_PER_LEASE * live):
        return True
    return journal.events_since_compaction > max(SHORTEST_TO_COMPACT, 8 * live)
