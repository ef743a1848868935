"""Reads the history of a run and says what must not have happened. Pure: lines in, violations out.

Every time is on CLOCK_BOOTTIME of one machine, so the times of different processes can be compared.

A *tenure* is a time in which a worker may use a GPU: from when it took it until it left it, was killed, or its safe
time was over, whichever came first. The safe time ends one heartbeat before the server would expire the lease, by the
worker's own reckoning; an honest worker looks at its clock before it touches anything and stops by then. One that was
stopped with SIGSTOP cannot: its process may still have the GPU open, and its lock on the witness, long after its lease
expired and somebody else was granted the GPU. No lease with a TTL can prevent that; fences are there for it. So such a
worker's tenure ends with its safe time, whatever its lock says, and what counts is

- two workers within their safe time on one GPU (`overlap`), or sharers who together exceed what a GPU has (`overfull`);
- a witness that could not be had although nobody overstayed his safe time (`witness`);
- a write that a resource which compares fences would refuse although the writer was in his safe time (`stale_write`);
- fences that do not grow (`fence`), a lease that was granted twice with different outcomes (`second_grant`);
- somebody served before another one who certainly asked earlier for the same, or is more important (`order`);
- a renewal that gives less than the TTL that was asked for (`short`);
- a lease that was acknowledged and is unknown later, or that ended before its time without its holder's doing
  (`lost`), or that came back to life (`resurrected`);
- a GPU whose holder died and that nobody got again (`not_reused`), a local death that a healthy server did not notice
  (`death_unnoticed`), leases that are left when everybody has gone (`left_over`);
- an answer that no honest client should get (`answer`).
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

Line = Mapping[str, Any]
BY_THE_HOLDER = frozenset({"released", "cancelled"})
ROUNDED_S = 0.001
HONEST_STATUSES = frozenset({200, 201, 202, 404, 429, 500, 503})


class Violation(NamedTuple):
    kind: str
    text: str


@dataclass
class Lease:
    """What the history tells of one lease."""

    id: str
    who: str
    wishes: tuple[int, float | None]
    priority: int
    is_local: bool
    asked_at: float
    lines: list[Line] = field(default_factory=list)
    uuids: tuple[str, ...] = ()
    fence: int | None = None
    took_at: float | None = None
    left_at: float = inf
    unlocked_at: float = inf

    @property
    def answers(self) -> Iterator[Line]:
        return (line for line in self.lines if line["what"] == "answered")

    @property
    def safe_until(self) -> float:
        return max((line["until"] for line in self.lines if line["what"] in {"took", "renewed"}), default=-inf)

    @property
    def ended_at(self) -> float:
        """When its tenure ended at the latest, by what its holder knew."""
        return min(self.left_at, self.safe_until)


@dataclass
class History:
    """All lines in order of time, by lease where they are about one; `resources` are the lines of each GPU's resource."""

    lines: list[Line]
    resources: Mapping[str, Sequence[Line]] = field(default_factory=dict)
    usable_mb: float = inf
    leases: dict[str, Lease] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lines.sort(key=lambda line: line["at"])
        for line in self.lines:
            self._take_in(line)
        killed_at = {line["worker"]: line["at"] for line in self.lines if line["what"] == "killed"}
        for lease in self.leases.values():
            lease.left_at = min(lease.left_at, killed_at.get(lease.who, inf))

    def _take_in(self, line: Line) -> None:
        what = line["what"]
        if what == "asks":
            wishes = (line["gpus"], line["memory_mb"])
            self.leases[line["lease"]] = Lease(
                line["lease"], line["who"], wishes, line["priority"], line["is_local"], line["at"]
            )
        lease = self.leases.get(line.get("lease", ""))
        if lease is None or line["who"] != lease.who:
            return  # what the nemesis saw of it is no answer to its holder
        lease.lines.append(line)
        if what == "answered" and line.get("fence") and lease.fence is None:
            lease.fence, lease.uuids = line["fence"], tuple(line["uuids"])
        if what == "took":
            lease.took_at = line["at"]
        if what == "left":
            lease.left_at, lease.unlocked_at = line["left_at"], line["at"]

    @property
    def tenures(self) -> list[Lease]:
        return sorted((lease for lease in self.leases.values() if lease.took_at is not None), key=_took_at)


def read(folder: Path, usable_mb: float) -> History:
    """The history of a run in this folder."""
    lines = [line for path in folder.glob("*.history") for line in _json_lines(path)]
    resources = {path.stem: list(_json_lines(path)) for path in folder.glob("*.resource")}
    return History(lines, resources, usable_mb)


def check(history: History) -> list[Violation]:
    """Everything that is wrong."""
    checks = (
        check_overlap,
        check_witness,
        check_resources,
        check_fences,
        check_order,
        check_kept,
        check_answers,
        check_deaths,
        check_left_over,
    )
    return [violation for one in checks for violation in one(history)]


# --- who had what, and when ----------------------------------------------------------------------------------------


def check_overlap(history: History) -> Iterator[Violation]:
    """Nobody has a GPU while somebody else has it, and sharers fit."""
    on_gpu: dict[str, list[Lease]] = defaultdict(list)
    for lease in history.tenures:
        if _took_at(lease) >= lease.ended_at:
            continue  # it was over before it began
        for uuid in lease.uuids:
            here = [other for other in on_gpu[uuid] if other.ended_at > _took_at(lease)]
            for other in here:
                if None in {lease.wishes[1], other.wishes[1]}:
                    yield Violation("overlap", f"{_tell(lease)} took {uuid} which {_tell(other)} had")
            here.append(lease)
            together_mb = sum(other.wishes[1] or 0.0 for other in here)
            if together_mb > history.usable_mb:
                yield Violation("overfull", f"{together_mb} MB on {uuid}: {', '.join(map(_tell, here))}")
            on_gpu[uuid] = here


def check_witness(history: History) -> Iterator[Violation]:
    """The lock could be had, unless somebody overstayed."""
    holders: dict[str, list[Lease]] = defaultdict(list)
    for lease in history.tenures:
        for uuid in lease.uuids:
            holders[uuid].append(lease)
    for line in history.lines:
        if line["what"] != "witness_busy":
            continue
        at = line["at"]
        overstayed = any(
            other.id != line["lease"] and _took_at(other) < at and other.ended_at < at < _let_go_at(history, other)
            for other in holders[line["uuid"]]
        )
        if not overstayed:
            yield Violation(
                "witness", f"{line['lease']} could not lock {line['uuid']} at {at:.3f}, and nobody overstayed"
            )


def check_resources(history: History) -> Iterator[Violation]:
    """A write that comes too late by its fence was made by somebody whose time was over."""
    wrote = {(line["lease"], line["write"]): line for line in history.lines if line["what"] == "wrote"}
    for uuid, lines in history.resources.items():
        newest = -1
        for line in lines:
            if line["fence"] >= newest:
                newest = line["fence"]
                continue
            told = wrote.get((line["lease"], line["write"]))  # unknown: he was stopped and killed in between
            if told is not None and told["at"] < told["until"]:
                yield Violation("stale_write", f"{line['lease']} wrote to {uuid} with {line['fence']} after {newest}")


def check_fences(history: History) -> Iterator[Violation]:
    """No two grants have one fence; what was granted later has the higher one; a grant stays as it was."""
    by_fence: dict[int, str] = {}
    for lease in history.leases.values():
        if lease.fence is None:
            continue
        other = by_fence.setdefault(lease.fence, lease.id)
        if other != lease.id:
            yield Violation("fence", f"{other} and {lease.id} both have {lease.fence}")
        for line in lease.answers:
            if line.get("fence") and (line["fence"], tuple(line["uuids"])) != (lease.fence, lease.uuids):
                yield Violation("second_grant", f"{_tell(lease)} was later {line['fence']} on {line['uuids']}")
    # Granted before another one was even asked for.
    granted = sorted(
        (line["at"], lease.fence)
        for lease in history.leases.values()
        for line in islice(_active(lease), 1)
        if lease.fence is not None
    )
    times = [at for at, _ in granted]
    highest = list(accumulate((fence for _, fence in granted), max))
    for lease in history.leases.values():
        before = bisect_right(times, lease.asked_at)
        if lease.fence is not None and before and highest[before - 1] > lease.fence:
            yield Violation("fence", f"{_tell(lease)} was asked for after {highest[before - 1]} had been granted")
    for uuid, tenures in _exclusive_by_gpu(history).items():
        for earlier, later in pairwise(tenures):
            if (earlier.fence or 0) >= (later.fence or 0):
                yield Violation("fence", f"on {uuid} {_tell(later)} came after {_tell(earlier)}")


def check_order(history: History) -> Iterator[Violation]:
    """Of two who wish the same, the one who certainly came first, and is no less important, is served first.

    Certainly: he was told that he is in the queue before the other one asked. Fences tell who was served first. Whoever
    left the queue has no fence, or was last seen waiting before the other was served.
    """
    groups: dict[tuple[int, float | None], list[Lease]] = defaultdict(list)
    for lease in history.leases.values():
        groups[lease.wishes].append(lease)
    for leases in groups.values():
        for priority in {lease.priority for lease in leases}:
            first = [lease for lease in leases if lease.priority >= priority and _queued_at(lease) < inf]
            second = [lease for lease in leases if lease.priority == priority]
            yield from _check_fence_order(first, second)
            yield from _check_passed_over(first, second)
            yield from _check_importance([lease for lease in first if lease.priority > priority], second)


def _check_fence_order(first: Sequence[Lease], second: Sequence[Lease]) -> Iterator[Violation]:
    queued = sorted((lease for lease in first if lease.fence is not None), key=_queued_at)
    times = [_queued_at(lease) for lease in queued]
    slowest = list(accumulate(queued, _later_served))
    for lease in second:
        before = bisect_right(times, lease.asked_at)
        if lease.fence is not None and before and _fence(slowest[before - 1]) > lease.fence:
            yield Violation(
                "order", f"{_tell(lease)} was served before {_tell(slowest[before - 1])}, who asked earlier"
            )


def _check_passed_over(first: Sequence[Lease], second: Sequence[Lease]) -> Iterator[Violation]:
    served = sorted((lease for lease in second if lease.fence is not None), key=lambda lease: lease.asked_at)
    times = [lease.asked_at for lease in served]
    told = [next((line["at"] for line in _active(lease)), inf) for lease in served]
    soonest = list(accumulate(reversed(told), min))[::-1]
    for lease in first:
        after = bisect_right(times, _queued_at(lease))
        if after < len(soonest) and soonest[after] < _waited_until(lease):
            yield Violation("order", f"{_tell(lease)} still waited when one who asked later had been served")


def _check_importance(first: Sequence[Lease], second: Sequence[Lease]) -> Iterator[Violation]:
    """Both were in the queue at once, certainly: the less important one still waited when the other had been queued."""
    waited = sorted((lease for lease in second if lease.fence is not None), key=_waited_until)
    times = [_waited_until(lease) for lease in waited]
    soonest = list(accumulate(map(_fence, reversed(waited)), min))[::-1]
    for lease in first:
        after = bisect_right(times, _queued_at(lease))
        if lease.fence is not None and after < len(soonest) and soonest[after] < lease.fence:
            yield Violation("order", f"{_tell(lease)} was served after a less important one ({soonest[after]})")


# --- what was promised ---------------------------------------------------------------------------------------------


def check_kept(history: History) -> Iterator[Violation]:
    """What was acknowledged is kept: a grant through its safe time, a place in the queue through its TTL, an end."""
    for lease in history.leases.values():
        yield from _check_lease_kept(lease)


def _check_lease_kept(lease: Lease) -> Iterator[Violation]:
    given_back_at = min((line["sent"] for line in lease.lines if line.get("call") == "DELETE"), default=inf)
    is_acknowledged, safe_until, ended_at = False, -inf, inf
    ttl_s = next((line["ttl_s"] for line in lease.lines if line["what"] == "asks"), 0.0)
    for line in lease.lines:
        what, state, at = line["what"], line.get("state"), line["at"]
        is_alive = what == "renewed" or state in {"active", "queued"}
        if is_alive and line["sent"] > ended_at:
            yield Violation("resurrected", f"{_tell(lease)} is alive at {at:.3f} and had ended at {ended_at:.3f}")
        if what == "renewed" and line["left_s"] < ttl_s - (at - line["sent"]) - ROUNDED_S:
            yield Violation("short", f"{_tell(lease)} was renewed for {line['left_s']} of {ttl_s} s")
        if what in {"took", "renewed"} or state == "active":
            safe_until = max(safe_until, line["until"])
        elif state == "queued":
            if lease.fence is not None and line["sent"] > min((told["at"] for told in _active(lease)), default=inf):
                yield Violation("lost", f"{_tell(lease)} was active and is queued at {at:.3f}")
            safe_until = max(safe_until, line["sent"] + ttl_s)
        if what == "answered" and line["status"] == 404 and is_acknowledged:
            yield Violation("lost", f"{_tell(lease)} is unknown at {at:.3f}")
        reason = line.get("reason") if what == "lost" else line.get("end_reason")
        if reason is not None:
            is_own_doing = reason in BY_THE_HOLDER and at > given_back_at
            if not is_own_doing and (at < safe_until or reason in {*BY_THE_HOLDER, "unknown"}):
                yield Violation("lost", f"{_tell(lease)} is {reason} at {at:.3f}, safe until {safe_until:.3f}")
            ended_at = min(ended_at, at)
        is_acknowledged = is_acknowledged or state in {"queued", "active"}


def check_answers(history: History) -> Iterator[Violation]:
    """Nobody is refused who asks as he may."""
    for line in history.lines:
        if line["what"] == "answered" and line["status"] not in HONEST_STATUSES:
            yield Violation("answer", f"{line['call']} of {line['lease']}: {line['status']} {line.get('detail')}")
        elif line["what"] == "answered" and line["status"] == 500:
            yield Violation("answer", f"{line['call']} of {line['lease']}: 500 {line.get('detail')}")


def check_deaths(history: History) -> Iterator[Violation]:
    """The GPUs of the dead are used again, and a local death is noticed at once by a server that is well."""
    last_took_at: dict[str, float] = {}
    for lease in history.tenures:
        for uuid in lease.uuids:
            last_took_at[uuid] = _took_at(lease)
    by_worker: dict[str, list[Lease]] = defaultdict(list)
    for lease in history.tenures:
        by_worker[lease.who].append(lease)
    for line in history.lines:
        if line["what"] == "killed":
            for lease in by_worker[line["worker"]][-1:]:
                has_left = any(told["what"] == "left" for told in lease.lines)
                for uuid in () if has_left else lease.uuids:
                    if last_took_at[uuid] <= line["at"]:
                        yield Violation("not_reused", f"{uuid} after the death of {_tell(lease)}")
        elif line["what"] == "death_unnoticed":
            yield Violation("death_unnoticed", f"{line['lease']} is {line['state']} {line['after_s']:.2f} s after")


def check_left_over(history: History) -> Iterator[Violation]:
    """When everybody has gone, nothing is left."""
    for line in history.lines:
        if line["what"] == "final" and (line["leases"] or any(state != "free" for state in line["gpus"])):
            yield Violation("left_over", f"{line['leases']}, GPUs {line['gpus']}")


# --- parts ---------------------------------------------------------------------------------------------------------


def _let_go_at(history: History, lease: Lease) -> float:
    """When its lock was surely gone."""
    reaped_at = (
        line["reaped_at"] for line in history.lines if line["what"] == "killed" and line["worker"] == lease.who
    )
    return min(lease.unlocked_at, next(reaped_at, inf))


def _exclusive_by_gpu(history: History) -> dict[str, list[Lease]]:
    """Without those that were over before they began: somebody was stopped between looking and taking."""
    found: dict[str, list[Lease]] = defaultdict(list)
    for lease in history.tenures:
        if lease.wishes[1] is None and _took_at(lease) < lease.ended_at:
            for uuid in lease.uuids:
                found[uuid].append(lease)
    return found


def _active(lease: Lease) -> Iterator[Line]:
    return (line for line in lease.answers if line.get("state") == "active")


def _queued_at(lease: Lease) -> float:
    return next((line["at"] for line in lease.answers if line.get("state") == "queued"), inf)


def _waited_until(lease: Lease) -> float:
    """He was certainly in the queue at that time or later."""
    return max((line["sent"] for line in lease.answers if line.get("state") == "queued"), default=-inf)


def _took_at(lease: Lease) -> float:
    return inf if lease.took_at is None else lease.took_at


def _fence(lease: Lease) -> int:
    return lease.fence or 0


def _later_served(one: Lease, two: Lease) -> Lease:
    return max(one, two, key=_fence)


def _tell(lease: Lease) -> str:
    took = "" if lease.took_at is None else f", {lease.took_at:.3f}-{lease.ended_at:.3f}"
    return f"{lease.id} (fence {lease.fence}, asked {lease.asked_at:.3f}{took})"


def _json_lines(path: Path) -> Iterable[Line]:
    for text in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(text)
