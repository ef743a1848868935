"""The lines that workers wrote while they used a pool, as histories of leases.

Each line has `what`, `who` and `at`, a time on CLOCK_BOOTTIME of one machine, and `lease` where it is about one request.
Workers write `asks`, `answered`, `took`, `renewed`, `wrote`, `witness_busy`, `left`, `lost`, `exits` and
`could_not_go_on`; the process that breaks things writes `killed`, `death_unnoticed`, `outsider_came`, `outsider_left`,
`server_away`, `starved`, `second_server` (what it granted), `pool` (who waits, and what is free) and `final` (what is left).

A *tenure* is the time in which a worker may use a GPU: from `took` until it left the GPU, was killed, or its safe time
was over (`until`, one heartbeat before the server would expire the lease, by the worker's own clock; infinite where the
server watches the worker's process, and then only the worker itself may end the lease). An honest worker
looks at its clock before it touches anything. One that was stopped with SIGSTOP cannot: it may keep its lock on the
witness, a file for each GPU, long after its lease expired. No lease with a TTL prevents that; fences are there for it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]
# 80 % (the threshold) of a simulated A100 with 80 GB.
USABLE_MB = 0.8 * 81920


@dataclass(slots=True)
class LeaseRecord:
    """One request of one worker, from its lines. Times that never came are infinite."""

    key: str
    who: str
    turn: int
    wishes: tuple[int, float | None]
    priority: int
    ttl_s: float
    asked_at: float
    # The server's id; the worker may have learned it after the request.
    id: str
    lines: list[Line] = field(default_factory=list)
    fence: int | None = None
    uuids: tuple[str, ...] = ()
    gpu_ids: tuple[int, ...] = ()
    queued_at: float = inf
    # The lease was certainly in the queue at this time, or later.
    waited_until: float = -inf
    granted_at: float = inf
    took_at: float = inf
    safe_until: float = -inf
    left_at: float = inf
    unlocked_at: float = inf
    was_killed: bool = False
    is_over: bool = False

    @property
    def ended_at(self) -> float:
        """The latest end of its tenure, as its holder knew."""
        return min(self.left_at, self.safe_until)

    @property
    def is_local(self) -> bool:
        """Whether the server watches its holder's process, so that no TTL runs against it."""
        return self.safe_until == inf

    @property
    def certainly_waited_until(self) -> float:
        """The lease was granted after this time."""
        return max(self.asked_at, self.waited_until)

    @property
    def is_served(self) -> bool:
        """Whether its worker took a GPU."""
        return self.took_at < inf

    def add_line(self, line: Line) -> None:
        """Add a line that its worker wrote."""
        self.lines.append(line)
        what, state, at = line["what"], line.get("state"), line["at"]
        self.id = line.get("id", self.id)
        self.is_over = self.is_over or what == "lost" or line.get("end_reason") is not None
        if state == "queued":
            self.queued_at = min(self.queued_at, at)
            self.waited_until = max(self.waited_until, line["sent"])
        if what == "took" or state == "active":
            self.granted_at = min(self.granted_at, at)
        if self.fence is None and line.get("fence") is not None:
            self.fence, self.uuids = line["fence"], tuple(line["uuids"])
        if what in {"took", "renewed"}:
            self.safe_until = max(self.safe_until, line.get("until", inf))
        if what == "took":
            self.took_at, self.gpu_ids = at, tuple(line["gpu_ids"])
        if what == "left":
            self.left_at, self.unlocked_at = line["left_at"], at

    def __str__(self) -> str:
        return f"{self.who}'s turn {self.turn} (fence {'-' if self.fence is None else self.fence})"


@dataclass
class RunHistory:
    """All lines in order of time, and their leases; `resources` are the lines of each GPU's resource."""

    lines: Sequence[Line]
    resources: Mapping[str, Sequence[Line]] = field(default_factory=dict)
    usable_mb: float = inf
    leases: dict[str, LeaseRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lines = sorted(self.lines, key=lambda line: float(line["at"]))
        for line in self.lines:
            key = line.get("lease", "")
            if line["what"] == "asks":
                wishes, ttl_s = (line["gpus"], line["memory_mb"]), line.get("ttl_s", inf)
                facts = (line["who"], line["turn"], wishes, line["priority"], ttl_s, line["at"])
                self.leases[key] = LeaseRecord(key, *facts, id=key)
            lease = self.leases.get(key)
            # The lines of other processes about a lease are not answers to its holder.
            if lease is not None and line["who"] == lease.who:
                lease.add_line(line)
        self.killed = {line["worker"]: line for line in self.lines if line["what"] == "killed"}
        for lease in self.leases.values():
            if lease.who in self.killed and lease.left_at == inf:
                lease.left_at, lease.was_killed = self.killed[lease.who]["at"], True
        self.tenures = sorted((one for one in self.leases.values() if one.is_served), key=attrgetter("took_at"))

    def holders(self) -> dict[str, list[LeaseRecord]]:
        """The exclusive tenures of each GPU in order, without those that were over before they began."""
        found: dict[str, list[LeaseRecord]] = defaultdict(list)
        for lease in self.tenures:
            for uuid in lease.uuids if lease.wishes[1] is None and lease.took_at < lease.ended_at else ():
                found[uuid].append(lease)
        return found

    def of_kind(self, what: str) -> Iterator[Line]:
        """The lines of one kind."""
        return (line for line in self.lines if line["what"] == what)


def read_history(folder: Path) -> RunHistory:
    """What the processes of a run left in its folder."""

    def lines_of(path: Path) -> list[Line]:
        return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]

    lines = [line for path in folder.glob("*.history") for line in lines_of(path)]
    return RunHistory(lines, {path.stem: lines_of(path) for path in folder.glob("*.resource")}, USABLE_MB)
