"""The contract of a fleet's database, whatever it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpu_worker_pool.core.fleet.leadership import JournalEnd, JournalSnapshot, LeaderRow, StoredEvent
from gpu_worker_pool.core.model.events import DurableEvent
from gpu_worker_pool.core.model.lease import EndedLease

from .journal import JournalError


class OutcomeUnknown(JournalError):  # noqa: N818 - a state of affairs, not a mistake
    """The answer of the database was lost: it is not known whether the change was made."""


class HistoryChanged(JournalError):  # noqa: N818 - a state of affairs, not a mistake
    """The journal's past is not what this process has read of it; it must be read again from its snapshot."""


class FleetDatabase(Protocol):
    """The leadership and the journal of a fleet, shared by all candidates.

    A call raises JournalError if it certainly changed nothing, and OutcomeUnknown if the answer was lost.
    """

    @property
    def pool_id(self) -> str:
        """The identity of the pool: random, made with the journal, and as lasting as that."""

    async def open(self) -> None:
        """Connect, create the tables, and choose the pool."""

    async def close(self) -> None:
        """Disconnect. Closing twice is harmless."""

    async def wait_for_news(self, timeout_s: float) -> None:
        """Wait until a leader has come or gone, or until the timeout. News may be lost, so ask after either."""

    async def read_leader(self) -> LeaderRow:
        """Return the leadership as it is now."""

    async def claim(self, term: str, holder: str, url: str, seen_epoch: int) -> LeaderRow | None:
        """Take the leadership if nobody has it, with an epoch higher than `seen_epoch`; None if it is taken."""

    async def renew(self, epoch: int, term: str) -> LeaderRow | None:
        """Keep the leadership for longer; None if it is lost."""

    async def hand_over(self, epoch: int, term: str) -> None:
        """Let the leadership expire at once, if it is still this one."""

    async def append(  # noqa: PLR0917 - the order is that of the statement
        self,
        epoch: int,
        term: str,
        end: JournalEnd,
        batch: str,
        events: Sequence[DurableEvent],
        ended: Sequence[EndedLease],
    ) -> JournalEnd | None:
        """Write these after `end`, all or none, renew the leadership, and return the new end. None, and nothing is
        written, if epoch, term or end differ; `read_leader` says which.
        """

    async def read_events(self, after: JournalEnd, most: int) -> list[StoredEvent]:
        """Return at most this many events after this end, in order and without gaps. Raises JournalDamaged, JournalTooNew,
        and HistoryChanged if the journal does not go on from there: it is another one, or a snapshot has replaced events.
        """

    async def load_snapshot(self) -> JournalSnapshot | None:
        """Return the newest snapshot that is whole; None if there is none."""

    async def write_snapshot(self, end: JournalEnd, events: Sequence[DurableEvent]) -> None:
        """Keep what all events up to this end add up to, and prune what an older snapshot covers already. Raises
        HistoryChanged if the journal does not have this end.
        """

    async def load_ended(self, most: int) -> tuple[EndedLease, ...]:
        """Return at most this many of the last leases that ended, oldest first."""
