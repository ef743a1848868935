"""Who used the GPUs for how long, at one server or at several together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from http import HTTPStatus
from typing import Any

from gpu_worker_pool.cli.output import plain
from gpu_worker_pool.failure import USAGE, Failure
from gpu_worker_pool.wire.accounting import UsageTotal, UsageView
from gpu_worker_pool.wire.reader import has_all, read, read_time
from gpu_worker_pool.wire.same_server import pool_key, same_as

from .reading import ask_pool
from .servers import ServerAnswer, Servers, nobody_answered

# What is known of each owner, as the server's documentation of /usage has it.
COLUMNS = tuple(item.name for item in fields(UsageTotal))
NO_REPORT = "its answer is not a report of usage; is it a GPU server of another version?"
STATISTICS_ONLY = "it has statistics only, no leases, so there is no ledger to report from"
NO_USAGE = "it has leases, but is too old to report from them; update it"
_INVALID_REQUEST = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY})


@dataclass(frozen=True, slots=True)
class ServerUsage:
    """What one server reports; `error` says why it does not. `same_as` names an earlier endpoint of the same server."""

    endpoint: str
    url: str
    error: str | None = None
    view: UsageView | None = None
    source: str | None = None
    same_as: str | None = None
    # As the server answered it.
    body: Any = None

    @property
    def counted(self) -> UsageView | None:
        """What it reports, unless that is in the sums already."""
        return self.view if self.same_as is None else None


def read_usage(answer: ServerAnswer) -> ServerUsage:
    """The report in an answer; an answer that makes no sense is an error, not a report of no usage."""
    if answer.error is not None:
        return ServerUsage(answer.endpoint, answer.url, error=plain(answer.error))
    view = read(UsageView, answer.data, clean=plain)
    if view is None or not _is_whole(view, answer.data):
        return ServerUsage(answer.endpoint, answer.url, error=NO_REPORT)
    return ServerUsage(answer.endpoint, answer.url, view=view, source=view.source, body=answer.data)


def _is_whole(view: UsageView, data: Any) -> bool:
    """Whether all of it could be read, and every amount and time can be one."""
    totals = (*view.owners, *([] if view.others is None else [view.others]))
    return (
        has_all(view, data, "owners")
        and (view.others is None) == (data.get("others") is None)
        and all(read_time(text) is not None for text in (view.since, view.until))
        and (view.complete_since is None or read_time(view.complete_since) is not None)
        and all(getattr(total, name) >= 0 for total in totals for name in COLUMNS)
    )


async def ask_usage(servers: Servers, path: str) -> UsageReport:
    """What all servers report; Failure where none has anything to report.

    Adding up may take a server long, so one that is silent is found by another call, and not waited for.
    """
    reached = await servers.ask_all("/health")
    asked = await asyncio.gather(*(_ask_one(servers, answer, path) for answer in reached))
    found = mark_same(usage for _, usage in asked)
    if any(usage.error is None for usage in found):
        return UsageReport(found)
    if all(answer.status is None for answer, _ in asked):
        raise nobody_answered([answer for answer, _ in asked])
    reasons = "; ".join(f"{usage.endpoint} ({usage.url}): {usage.error}" for usage in found)
    if any(answer.status in _INVALID_REQUEST for answer, _ in asked):
        raise Failure(f"this cannot be reported: {reasons}", USAGE)
    hint = " For leases and reports, run `gpu-pool serve` there." if STATISTICS_ONLY in reasons else ""
    raise Failure(f"there is nothing to report from: {reasons.rstrip('.')}.{hint}")


async def _ask_one(servers: Servers, reached: ServerAnswer, path: str) -> tuple[ServerAnswer, ServerUsage]:
    endpoint = reached.endpoint
    answer = reached if reached.status is None else await servers.ask(endpoint, path)
    if answer.status != HTTPStatus.NOT_FOUND:
        return answer, read_usage(answer)
    # It does not know this call: why, is known by what kind of server it is.
    report = await ask_pool(servers, endpoint, "?queue=0&leases=0")
    if not report.is_up:
        return answer, ServerUsage(endpoint, report.url, error=f"it is not a GPU server: {report.error}")
    error = NO_USAGE if report.has_leases else STATISTICS_ONLY
    return answer, ServerUsage(endpoint, report.url, error=error, source=report.view.source)


def mark_same(servers: Iterable[ServerUsage]) -> list[ServerUsage]:
    found = list(servers)
    same = same_as(
        (server.endpoint, pool_key(server.view.server_id, server.view.node) if server.view else None)
        for server in found
    )
    return [replace(server, same_as=same.get(server.endpoint)) for server in found]


@dataclass(frozen=True, slots=True)
class UsageReport:
    servers: Sequence[ServerUsage]

    def boxes_of_one_fleet(self) -> list[list[str]]:
        """Endpoints that are counted one by one, and belong to the same fleet."""
        found: dict[str, list[str]] = {}
        for server in self.servers:
            if server.counted is not None:
                found.setdefault(server.counted.server_id, []).append(server.endpoint)
        return [endpoints for endpoints in found.values() if len(endpoints) > 1]

    def by_owner(self) -> list[tuple[str | None, UsageTotal]]:
        """The owner who used most comes first. Two owners may look alike once they are made plain."""
        found: dict[str | None, list[UsageTotal]] = {}
        for view in self._counted():
            for usage in view.owners:
                found.setdefault(usage.owner, []).append(usage)

        def most_first(item: tuple[str | None, UsageTotal]) -> tuple[float, float, str]:
            owner, total = item
            return -total.gpu_hours - total.shared_gpu_hours, -total.wait_hours, owner or ""

        return sorted(((owner, add_up(usages)) for owner, usages in found.items()), key=most_first)

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
    return {name: round(getattr(usage, name), 6) for name in COLUMNS}
