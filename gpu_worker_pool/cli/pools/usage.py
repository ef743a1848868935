"""Who used the GPUs for how long, at one server or at several together. Nothing here calls a server or prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from http import HTTPStatus
from typing import Any

from gpu_worker_pool.cli.failure import FAILED, USAGE, Failure
from gpu_worker_pool.cli.output import plain
from gpu_worker_pool.wire.accounting import UsageTotal, UsageView
from gpu_worker_pool.wire.reader import has_all, read, read_time
from gpu_worker_pool.wire.same_server import same_as

from .report import PoolReport
from .servers import ServerAnswer, nobody_answered

# What is known of each owner, as the server's documentation of /usage has it.
COLUMNS = tuple(item.name for item in fields(UsageTotal))
NO_REPORT = "its answer is not a report of usage; is it an older or another kind of server?"
STATISTICS_ONLY = "it has statistics only, no leases, so there is no ledger to report from"
NO_USAGE = "it has leases, but is too old to report from them; update it"
# The statuses by which a server says that the request makes no sense.
_TYPED_WRONG = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY})


@dataclass(frozen=True, slots=True)
class ServerUsage:
    """What one server reports; `error` says why it does not. `same_as` is the endpoint at which the same server was
    asked already.
    """

    endpoint: str
    url: str
    error: str | None = None
    view: UsageView | None = None
    source: str | None = None
    same_as: str | None = None

    @property
    def counted(self) -> UsageView | None:
        """What it reports, unless that is in the sums already."""
        return self.view if self.same_as is None else None

    def as_json(self) -> dict[str, Any]:
        view = self.view
        return {
            "endpoint": self.endpoint,
            "url": self.url,
            "node": view.node if view else None,
            "error": self.error,
            "same_as": self.same_as,
            "since": view.since if view else None,
            "until": view.until if view else None,
            "complete_since": view.complete_since if view else None,
            "is_complete": view.is_complete if view else None,
            "source": self.source,
        }


def read_usage(answer: ServerAnswer) -> ServerUsage:
    """The report in an answer; an answer that makes no sense is an error, not a report of no usage."""
    if answer.error is not None:
        return ServerUsage(answer.endpoint, answer.url, error=plain(answer.error))
    view = read(UsageView, answer.data, clean=plain)
    if view is None or not _is_whole(view, answer.data):
        return ServerUsage(answer.endpoint, answer.url, error=NO_REPORT)
    return ServerUsage(answer.endpoint, answer.url, view=view, source=view.source)


def _is_whole(view: UsageView, data: Any) -> bool:
    """Whether all of it could be read, and every amount and time can be one."""
    times = (view.since, view.until, *([] if view.complete_since is None else [view.complete_since]))
    totals = (*view.owners, *([] if view.others is None else [view.others]))
    return (
        has_all(view, data, "owners")
        and (view.others is None) == (data.get("others") is None)
        and all(read_time(text) is not None for text in times)
        and all(getattr(total, name) >= 0 for total in totals for name in COLUMNS)
    )


def without_ledger(report: PoolReport) -> ServerUsage:
    """For a server that does not know /usage, by its kind."""
    if not report.is_up:
        return ServerUsage(report.endpoint, report.url, error=f"it is not a GPU server: {report.error}")
    error = NO_USAGE if report.has_leases else STATISTICS_ONLY
    return ServerUsage(report.endpoint, report.url, error=error, source=report.view.source)


def no_report(asked: Sequence[tuple[ServerAnswer, ServerUsage]]) -> Failure:
    """The failure where no server has anything to report, by what they said."""
    if all(answer.status is None for answer, _ in asked):
        return nobody_answered([answer for answer, _ in asked])
    reasons = "; ".join(f"{usage.endpoint} ({usage.url}): {usage.error}" for _, usage in asked)
    if any(answer.status in _TYPED_WRONG for answer, _ in asked):
        return Failure(f"this cannot be reported: {reasons}", USAGE)
    hint = " For leases and reports, run `gpu-pool serve` there." if STATISTICS_ONLY in reasons else ""
    return Failure(f"there is nothing to report from: {reasons.rstrip('.')}.{hint}", FAILED)


def mark_same(servers: Iterable[ServerUsage]) -> list[ServerUsage]:
    """Marks those that are an earlier server by another name: it must not be counted twice."""
    found = list(servers)
    same = same_as((server.endpoint, server.view.server_id if server.view else None) for server in found)
    return [replace(server, same_as=same.get(server.endpoint)) for server in found]


@dataclass(frozen=True, slots=True)
class UsageReport:
    """All servers together."""

    servers: Sequence[ServerUsage]

    @property
    def is_complete(self) -> bool:
        """Whether all that was used is known: every server answered, and knows the whole span."""
        return all(server.view is not None and server.view.is_complete for server in self.servers)

    def by_owner(self) -> list[tuple[str | None, UsageTotal]]:
        """The owner who used most comes first. Two owners may look alike once they are made plain."""
        found: dict[str | None, list[UsageTotal]] = {}
        for view in self._counted():
            for usage in view.owners:
                found.setdefault(usage.owner, []).append(usage)
        sums = [(owner, add_up(usages)) for owner, usages in found.items()]
        return sorted(
            sums, key=lambda item: (-item[1].gpu_hours - item[1].shared_gpu_hours, -item[1].wait_hours, item[0] or "")
        )

    def others(self) -> tuple[int, UsageTotal] | None:
        """Owners that a server did not tell one by one: how many at most, and what they used; None where there are none."""
        found = [view.others for view in self._counted() if view.others is not None]
        return (sum(other.owners for other in found), add_up(found)) if found else None

    def total(self) -> UsageTotal:
        others = self.others()
        return add_up([usage for _, usage in self.by_owner()] + ([others[1]] if others else []))

    def _counted(self) -> list[UsageView]:
        return [view for server in self.servers if (view := server.counted) is not None]


def add_up(usages: Iterable[UsageTotal]) -> UsageTotal:
    found = list(usages)
    sums: dict[str, Any] = {name: sum(getattr(usage, name) for usage in found) for name in COLUMNS}
    longest = max((usage.longest_hours for usage in found), default=0.0)
    return UsageTotal(**{**sums, "longest_hours": longest})


def amounts(usage: UsageTotal) -> dict[str, Any]:
    """The amounts as docs/CLI.md describes them."""
    return {name: round(getattr(usage, name), 6) for name in COLUMNS}
