"""Who used the GPUs for how long, at one server or at several together. Nothing here asks anybody or prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from http import HTTPStatus
from math import isfinite
from typing import Any

from gpu_worker_pool.cli.failure import FAILED, USAGE, Failure
from gpu_worker_pool.cli.output import plain

from .report import PoolReport
from .servers import Answer, nobody_answered

# What is known of each owner, as the server's documentation of /usage has it.
COLUMNS = (
    "gpu_hours",
    "shared_gpu_hours",
    "leases",
    "running",
    "longest_hours",
    "wait_hours",
    "unknown_leases",
    "unknown_waits",
)
NO_REPORT = "its answer is no report of usage; is it an older or another kind of server?"
STATISTICS_ONLY = "it has statistics only, no leases, so there is no ledger to report from"
NO_USAGE = "it has leases, but is too old to report from them; update it"
# What was asked for makes no sense to the server.
_TYPED_WRONG = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY})


@dataclass(slots=True)
class Usage:
    """What leases come to. The server's documentation of /usage says what each of these is."""

    gpu_hours: float = 0.0
    shared_gpu_hours: float = 0.0
    leases: int = 0
    running: int = 0
    longest_hours: float = 0.0
    wait_hours: float = 0.0
    unknown_leases: int = 0
    unknown_waits: int = 0

    def add(self, other: Usage) -> None:
        """Count the other's as well."""
        for name in COLUMNS:
            mine, others = getattr(self, name), getattr(other, name)
            setattr(self, name, max(mine, others) if name == "longest_hours" else mine + others)

    def as_json(self) -> dict[str, Any]:
        """As docs/CLI.md has it."""
        return {name: round(getattr(self, name), 6) for name in COLUMNS}


@dataclass(frozen=True, slots=True)
class ServerUsage:
    """What one server reports; `error` says why it does not. `same_as` is the endpoint at which the same server was
    asked already. Of what ended before `complete_since` it does not know everything any more.
    """

    endpoint: str
    url: str
    error: str | None = None
    node: str | None = None
    server_id: str | None = None
    same_as: str | None = None
    since: str | None = None
    until: str | None = None
    complete_since: str | None = None
    is_complete: bool = True
    source: str | None = None
    by_owner: Mapping[str | None, Usage] = field(default_factory=dict)
    others: Usage | None = None
    other_owners: int = 0

    @property
    def is_counted(self) -> bool:
        """Whether what it reports is in the sums."""
        return self.error is None and self.same_as is None

    def as_json(self) -> dict[str, Any]:
        """As docs/CLI.md has it."""
        return {
            "endpoint": self.endpoint,
            "url": self.url,
            "node": self.node,
            "error": self.error,
            "same_as": self.same_as,
            "since": self.since,
            "until": self.until,
            "complete_since": self.complete_since,
            "is_complete": self.is_complete if self.error is None else None,
            "source": self.source,
        }


def read_usage(answer: Answer) -> ServerUsage:
    """The report in an answer; one that makes no sense is no report, and is not taken for no usage."""
    if answer.error is not None:
        return ServerUsage(answer.endpoint, answer.url, error=plain(answer.error))
    data = answer.data
    try:
        others = data["others"]
        return ServerUsage(
            answer.endpoint,
            answer.url,
            node=_text(data["node"]),
            server_id=_text(data["server_id"]),
            since=_time(data["since"]),
            until=_time(data["until"]),
            complete_since=None if data["complete_since"] is None else _time(data["complete_since"]),
            is_complete=bool(data["is_complete"]),
            source=_text(data["source"]),
            by_owner=_by_owner(data["owners"]),
            others=None if others is None else _usage(others),
            other_owners=0 if others is None else int(_number(others["owners"])),
        )
    except (KeyError, TypeError, ValueError):
        return ServerUsage(answer.endpoint, answer.url, error=NO_REPORT)


def without_ledger(report: PoolReport) -> ServerUsage:
    """For a server that does not know /usage, by what it is otherwise."""
    if not report.is_up:
        return ServerUsage(report.endpoint, report.url, error=f"it is no GPU server: {report.error}")
    error = NO_USAGE if report.has_leases else STATISTICS_ONLY
    return ServerUsage(report.endpoint, report.url, error=error, source=report.source)


def no_report(asked: Sequence[tuple[Answer, ServerUsage]]) -> Failure:
    """For when no server has anything to report; what to do depends on what they said."""
    if all(answer.status is None for answer, _ in asked):
        return nobody_answered([answer for answer, _ in asked])
    reasons = "; ".join(f"{usage.endpoint} ({usage.url}): {usage.error}" for _, usage in asked)
    if any(answer.status in _TYPED_WRONG for answer, _ in asked):
        return Failure(f"this cannot be reported: {reasons}", USAGE)
    hint = " For leases and reports, run `gpu-pool serve` there." if STATISTICS_ONLY in reasons else ""
    return Failure(f"there is nothing to report from: {reasons.rstrip('.')}.{hint}", FAILED)


def mark_same(servers: Iterable[ServerUsage]) -> list[ServerUsage]:
    """A server that goes by two names must not be counted twice."""
    first: dict[str | None, str] = {None: ""}
    marked = []
    for server in servers:
        other = first.setdefault(server.server_id, server.endpoint)
        marked.append(replace(server, same_as=other) if other not in {"", server.endpoint} else server)
    return marked


@dataclass(frozen=True, slots=True)
class UsageReport:
    """All servers together."""

    servers: Sequence[ServerUsage]

    @property
    def is_complete(self) -> bool:
        """Whether all that was used is known: every server answered, and knows the whole span."""
        return all(server.error is None and server.is_complete for server in self.servers)

    def by_owner(self) -> list[tuple[str | None, Usage]]:
        """Who used most comes first."""
        sums: dict[str | None, Usage] = {}
        for server in self.servers:
            if server.is_counted:
                for owner, usage in server.by_owner.items():
                    sums.setdefault(owner, Usage()).add(usage)
        return sorted(
            sums.items(),
            key=lambda item: (-item[1].gpu_hours - item[1].shared_gpu_hours, -item[1].wait_hours, item[0] or ""),
        )

    def others(self) -> tuple[int, Usage] | None:
        """Those whom a server did not tell one by one: how many at most, and what they used; None where there are none."""
        found = [server for server in self.servers if server.is_counted and server.others is not None]
        if not found:
            return None
        usage = Usage()
        for server in found:
            usage.add(server.others or Usage())
        return sum(server.other_owners for server in found), usage

    def total(self) -> Usage:
        """Everybody together."""
        total = Usage()
        for _, usage in self.by_owner():
            total.add(usage)
        others = self.others()
        if others is not None:
            total.add(others[1])
        return total


def _usage(item: Mapping[str, Any]) -> Usage:
    return Usage(**{name: _number(item[name]) for name in COLUMNS})


def _number(value: object) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no amount")
    return value


def _by_owner(items: Iterable[Mapping[str, Any]]) -> dict[str | None, Usage]:
    found: dict[str | None, Usage] = {}
    for item in items:
        owner = None if item["owner"] is None else _text(item["owner"])
        # Two may look alike once they are made plain.
        found.setdefault(owner, Usage()).add(_usage(item))
    return found


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return plain(value)


def _time(value: object) -> str:
    text = _text(value)
    datetime.fromisoformat(text)
    return text
