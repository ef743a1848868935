"""The contract of a journal, whatever it writes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

# For types only: a command that looks for a folder need not load the core.
if TYPE_CHECKING:
    from gpu_worker_pool.core.model.events import DurableEvent
    from gpu_worker_pool.core.model.lease import EndedLease


class JournalError(Exception):
    """The journal cannot be written or read; the message says why and what to do."""


class OutcomeUnknown(JournalError):  # noqa: N818 - a state of affairs, not a mistake
    """The answer of the database was lost: it is not known whether the change was made."""


class HistoryChanged(JournalError):  # noqa: N818 - a state of affairs, not a mistake
    """The journal's past is not what this process has read of it; it must be read again from its snapshot."""


class NotWritten(Exception):  # noqa: N818 - a state of affairs, not a mistake
    """The journal cannot be written, so no client may rely on any change. Asking again with the same id is harmless, and
    helps where the trouble is temporary. `leader_url` is that of another server that leads; then nothing was carried out.
    """

    def __init__(self, trouble: str | None, *, is_temporary: bool = True, leader_url: str | None = None) -> None:
        super().__init__(trouble)
        self.is_temporary = is_temporary
        self.leader_url = leader_url


class JournalInUse(JournalError):  # noqa: N818 - a state of affairs, not a mistake
    """Another process writes this journal; `pid` is its pid, if known."""

    def __init__(self, message: str, pid: int | None) -> None:
        super().__init__(message)
        self.pid = pid


class JournalDamaged(JournalError):  # noqa: N818 - a state of affairs, not a mistake
    """The journal's contents cannot be read."""


class JournalTooNew(JournalError):  # noqa: N818 - a state of affairs, not a mistake
    """The journal is whole, and has something that this version of the program does not know: a newer one wrote it."""


class History(NamedTuple):
    """The events of a journal in order, and the last leases that ended, oldest first, also if their events are compacted away."""

    events: tuple[DurableEvent, ...] = ()
    ended: tuple[EndedLease, ...] = ()


class Journal(Protocol):
    """Keeps events in order. All calls block, and no two threads call at once. A call that raises JournalError has changed
    nothing, and may be repeated.
    """

    @property
    def pool_id(self) -> str:
        """The identity of the pool: random, made with the journal, and as lasting as that."""

    def load(self, most_ended: int) -> History:
        """Return all events, and at most this many ended leases."""

    def append(self, events: Sequence[DurableEvent], ended: Sequence[EndedLease]) -> None:
        """Write these, all or none. Then they survive a crash of the process, and at full durability one of the machine.
        `ended` are the leases that these events ended; one that is recorded already (same id, same time of its request) is replaced.
        """

    def compact(self, events: Sequence[DurableEvent]) -> None:
        """Replace all events by these, all or none. Records of ended leases stay."""

    def replace_damaged(self, events: Sequence[DurableEvent]) -> None:
        """Quarantine the damaged journal, where it is not overwritten, and start a new one with these events."""

    @property
    def events_since_compaction(self) -> int:
        """The number of events appended since the last compaction, or since the beginning."""

    @property
    def bytes_since_compaction(self) -> int:
        """The size of these events; 0 where it is not limited."""

    def close(self) -> None:
        """Release the journal, so that another process may open it. Closing twice is harmless."""
