"""Accounting of ended leases, read beside the writer of a journal."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager
from math import inf
from typing import Any, Protocol, TypeVar

from gpu_worker_pool.core.accounting.timeline import Timeline
from gpu_worker_pool.core.accounting.usage import LeaseTimes

from .codec import decode_ended
from .journal import JournalDamaged

# After this many leases other threads get the interpreter for this long: a long account delays no request.
LEASES_AT_ONCE = 200
BODIES_AT_ONCE = 25
PAUSE_S = 0.0002


class Account(Protocol):
    """Adds up leases from `since` to before `until` (None: open)."""

    @property
    def since(self) -> float: ...

    @property
    def until(self) -> float | None: ...

    def count(self, lease: LeaseTimes) -> None: ...


A = TypeVar("A", bound=Account)


class EndedLeases(Protocol):
    """The ended leases as they were at one moment: later writes and pruning are not seen."""

    complete_since: float | None

    def read(self, query: str, arguments: tuple[float, ...], at_once: int = LEASES_AT_ONCE) -> Iterator[Any]:
        """The rows of a query, by its name."""


class Accounts(ABC):
    """The ended leases of a journal, through a read-only connection of its own: the writer does not wait for it.

    All calls block, so they belong in a thread. Any number may run at once, from any process.
    """

    def count(
        self, begin: Callable[[], A], *, but_for: Container[str] = (), node: str | None = None
    ) -> tuple[A, float | None]:
        """Add all ended leases except `but_for` to the account that `begin` makes, and return it with the time (seconds
        since 1970) since which the records are complete, None if none was ever removed.

        `begin` is called after the read transaction has started, so no lease in it ended after the account's `now`.
        With a `node`, only leases that held GPUs there count, with these. Raises JournalError if the journal cannot be read.
        """
        with self._one_moment() as leases:
            account = begin()
            until = inf if account.until is None else account.until
            rows = leases.read("read_ended_within", (account.since, until))
            for lease_id, owner, gpu_count, is_shared, requested, granted, ended, reason, gpus in rows:
                if node is not None:
                    gpu_count = sum(of_node == node for of_node, _ in json.loads(gpus))  # noqa: PLW2901 - of the scope
                if lease_id not in but_for and (node is None or gpu_count):
                    times = LeaseTimes(owner, gpu_count, bool(is_shared), requested, granted, ended, end_reason=reason)
                    account.count(times)
        return account, leases.complete_since

    def trace(self, begin: Callable[[], Timeline], *, but_for: Container[str] = ()) -> tuple[Timeline, float | None]:
        """As `count`, for the timeline that `begin` makes; the last lease is added first."""
        with self._one_moment() as leases:
            timeline = begin()
            within = (timeline.since, timeline.now)
            for (lease_id,) in leases.read("read_unknown_within", within):
                timeline.unknown_leases += lease_id not in but_for
            for lease_id, body in leases.read("read_held_within", within, BODIES_AT_ONCE):
                if timeline.is_cut:
                    break
                if lease_id not in but_for:
                    try:
                        timeline.add(decode_ended(body))
                    except ValueError as error:
                        raise JournalDamaged(f"the journal {self.where} is damaged: {error}") from error
        return timeline, leases.complete_since

    @property
    @abstractmethod
    def where(self) -> str:
        """The journal's place, for messages."""

    @abstractmethod
    def _one_moment(self) -> AbstractContextManager[EndedLeases]: ...

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.where}>"
