"""Accounting of ended and live leases, in SQL, beside the writer of a journal."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.host.pauses import Pauses

from .codec import decode_ended
from .journal import JournalDamaged
from .sql import load_queries
from .sqlite.file import connect, journal_errors

# From a time to before another one; None: open.
Span = tuple[float, float | None]
# Runs a query by its name, with these arguments.
Ask = Callable[..., Sequence[Any]]


def accounting_queries(package: str) -> Mapping[str, str]:
    """The queries of a package. The sums of the usage are the same in both databases."""
    queries, totals = load_queries(package), load_queries(__package__)["usage_totals"]
    return {**queries, "usage": f"{queries['usage']}\n{totals}"}


class LiveUse(NamedTuple):
    """What the accounting needs of a live lease. Times are seconds since 1970. One in the queue has no GPUs."""

    lease_id: str
    owner: str | None
    gpu_count: int
    is_shared: bool
    requested_at: float
    granted_at: float | None


@dataclass(slots=True)
class UsageTotals:
    """Totals of leases within a span. A lease of two GPUs for an hour is two GPU-hours.

    `gpu_s` is the time of exclusive leases, `shared_gpu_s` that of sharing leases, which overlap on a GPU. `leases`
    is how many held GPUs, `running` how many of these still do, `longest_s` the longest time of one. `wait_s` is time
    in the queue, including that of requests that left it without a GPU. `unknown_leases` held GPUs for an unknown time;
    `unknown_waits` waited for an unknown time. The three `_ends` count the leases that the pool ended within the span.
    `measured_gpu_s` is the time of ended leases whose utilization is known, `busy_gpu_s` that time by their mean utilization.
    """

    gpu_s: float = 0.0
    shared_gpu_s: float = 0.0
    leases: int = 0
    running: int = 0
    longest_s: float = 0.0
    wait_s: float = 0.0
    unknown_leases: int = 0
    unknown_waits: int = 0
    time_limit_ends: int = 0
    preempted_ends: int = 0
    idle_ends: int = 0
    measured_gpu_s: float = 0.0
    busy_gpu_s: float = 0.0

    def add(self, other: UsageTotals) -> None:
        longest_s = max(self.longest_s, other.longest_s)
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        self.longest_s = longest_s


Usage = Mapping[str | None, UsageTotals]


class Moment(NamedTuple):
    """When the accounts were read, and since when they are complete: None if no ended lease was ever removed."""

    now: float
    complete_since: float | None


class Accounts(ABC):
    """The ended leases of a journal, through a read-only connection of its own: the writer does not wait for it.

    All calls block, so they belong in a thread. Any number may run at once, from any process. Each sees one moment: later
    writes and pruning are not seen. `live` are leases that may have ended since they were looked at; they count as live.
    With a `node`, only leases that held GPUs there count, with these. JournalError if the journal cannot be read. `where` is
    the journal's place, for messages.
    """

    def __init__(self, where: str) -> None:
        self.where = where

    def usage(
        self,
        spans: Sequence[Span],
        wall_now: Callable[[], float],
        live: Sequence[LiveUse] = (),
        node: str | None = None,
    ) -> tuple[list[Usage], Moment]:
        """Add up the leases by owner, for each of the spans."""
        with self._one_moment() as ask:
            moment = self._moment(ask, wall_now)
            shown = [lease for lease in live if node is None or lease.gpu_count]
            found: list[dict[str | None, UsageTotals]] = [{} for _ in spans]
            for number, owner, *totals in ask("usage", moment.now, json.dumps(spans), self._as_json(shown), node):
                found[number][owner] = UsageTotals(*totals)
        return list(found), moment

    def held(
        self,
        span_s: float,
        wall_now: Callable[[], float],
        live: Sequence[LiveUse] = (),
        node: str | None = None,
        *,
        most: int,
    ) -> tuple[list[EndedLease], int, Moment]:
        """The last leases that held GPUs within these seconds, latest end first, at most `most` of them. How many held GPUs at
        unknown times.
        """
        with self._one_moment() as ask:
            moment = self._moment(ask, wall_now)
            arguments = (max(moment.now - span_s, 0.0), moment.now, self._as_json(live))
            ((unknown,),) = ask("count_unknown_holds", *arguments)
            bodies = [body for (body,) in ask("read_held", *arguments, node, most)]
        leases, pauses = [], Pauses()
        for body in bodies:
            try:
                leases.append(decode_ended(body))
            except ValueError as error:
                raise JournalDamaged(f"the journal {self.where} is damaged: {error}") from error
            pauses.yield_if_due()
        return leases, unknown, moment

    def _as_json(self, live: Sequence[LiveUse]) -> str:
        return json.dumps(live)

    @staticmethod
    def _moment(ask: Ask, wall_now: Callable[[], float]) -> Moment:
        """The time is read after the read transaction has started, so no lease in it ended later."""
        ((complete_since,),) = ask("complete_since")
        return Moment(wall_now(), complete_since)

    @abstractmethod
    def _one_moment(self) -> AbstractContextManager[Ask]: ...

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.where}>"


class SqliteAccounts(Accounts):
    """Read from a journal's file, beside its writer."""

    queries = accounting_queries(f"{__package__}.sqlite")

    def __init__(self, path: Path) -> None:
        super().__init__(str(path.absolute()))

    @contextmanager
    def _one_moment(self) -> Iterator[Ask]:
        path = Path(self.where)
        with journal_errors(path), closing(connect(path, "ro")) as connection:
            connection.execute("BEGIN")
            yield lambda query, *arguments: connection.execute(self.queries[query], arguments).fetchall()
