"""What the workers of a demo wrote down, and whether the promises were kept by it. Pure: lines in, findings out.

Every line has a time on CLOCK_BOOTTIME of one machine, so the times of different processes can be compared. A *turn* is
one request of one worker, from asking to giving back. A worker stamps the beginning of its holding after it was granted
the GPU and the end of it before it gives it back, so two holdings of one GPU that overlap were two holders at once. The
server has no part in these lines.

What is found:

- `held_twice`: two turns overlap on one GPU;
- `lock`: somebody was granted a GPU, and the lock that every holder keeps on a file of that GPU was taken;
- `fence`: on one GPU a later holder has no higher fence, two turns have the same one, or one that was asked for after
  another one was held has the lower one;
- `order`: of two requests, one was told that it is in the queue before the other one was even made, and was served
  after it. All workers of a demo ask for the same with the same priority;
- `unserved`: somebody was never served, and at the end a GPU was free or the server did not have him in line;
- `lost`: a lease was taken from a living holder, or is not what it was after the server's restart;
- `dead_holder`: the GPU of the worker that was killed was not handed on although somebody waited.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

Line = Mapping[str, Any]
# What the holder himself does to his lease.
BY_THE_HOLDER = frozenset({"released", "cancelled"})


class Violation(NamedTuple):
    """A promise that was broken."""

    kind: str
    text: str


@dataclass(slots=True)
class Turn:
    """One request of one worker. Times that never came are infinite."""

    worker: str
    number: int
    asked_at: float
    lease: str = ""
    queued_at: float = inf
    began_at: float = inf
    ended_at: float = inf
    gpu: int = -1
    uuid: str = ""
    fence: int = 0
    was_killed: bool = False

    @property
    def is_served(self) -> bool:
        """Whether it was granted a GPU."""
        return self.began_at < inf

    def __str__(self) -> str:
        return f"{self.worker}'s turn {self.number} (fence {self.fence or '-'})"


@dataclass(frozen=True, slots=True)
class Outage:
    """The server was killed and came back; `found` is what it then said of each lease, and when."""

    killed_at: float
    back_at: float
    found: Mapping[str, Line]
    found_at: float


class Survival(NamedTuple):
    """How many leases were held, and how many waited, when the server was killed; and of how many it still knew."""

    held: int
    kept: int
    waiting: int
    places_kept: int


class Handover(NamedTuple):
    """A GPU went from one who gave it back or died to one who waited for it."""

    before: Turn
    after: Turn

    @property
    def took_s(self) -> float:
        """From the end of the one to the beginning of the other."""
        return self.after.began_at - self.before.ended_at


def turns_of(lines: Iterable[Line]) -> list[Turn]:
    """The turns, in the order in which they were asked for."""
    turns: dict[tuple[str, int], Turn] = {}
    for line in sorted(lines, key=lambda line: float(line["at"])):
        if line["what"] == "asks":
            turns[line["worker"], line["turn"]] = Turn(line["worker"], line["turn"], line["at"])
        elif line["what"] == "killed":
            for turn in turns.values():
                if turn.worker == line["worker"] and turn.ended_at == inf:
                    turn.ended_at, turn.was_killed = line["at"], True
        elif (turn_ := turns.get((line["worker"], line.get("turn", 0)))) is not None:
            _take_in(turn_, line)
    return list(turns.values())


def _take_in(turn: Turn, line: Line) -> None:
    match line["what"]:
        case "queued":
            turn.queued_at, turn.lease = min(turn.queued_at, line["at"]), line["lease"]
        case "begins":
            turn.began_at, turn.lease = line["at"], line["lease"]
            turn.gpu, turn.uuid, turn.fence = line["gpu"], line["uuid"], line["fence"]
        case "ends":
            turn.ended_at = line["at"]


def check(lines: Sequence[Line], outage: Outage | None = None, pool: Line | None = None) -> list[Violation]:
    """Everything that is wrong with this record. `pool` is what the server showed at the end, where some still waited."""
    turns = turns_of(lines)
    return [
        *check_held_twice(turns),
        *_check_locks(lines),
        *check_fences(turns),
        *check_order(turns),
        *check_unserved(turns, pool),
        *_check_lost(lines),
        *_check_dead_holder(turns),
        *(check_survival(turns, outage) if outage else ()),
    ]


# --- one at a time -------------------------------------------------------------------------------------------------


def check_held_twice(turns: Iterable[Turn]) -> Iterator[Violation]:
    """Nobody has a GPU while somebody else has it."""
    for uuid, holders in _by_gpu(turns).items():
        latest = holders[0] if holders else None
        for turn in holders[1:]:
            if latest is not None and turn.began_at < latest.ended_at:
                both_ms = 1000 * (min(turn.ended_at, latest.ended_at) - turn.began_at)
                yield Violation(
                    "held_twice", f"GPU {turn.gpu} ({uuid}): {turn} had it while {latest} did, for {both_ms:.0f} ms"
                )
            latest = turn if latest is None or turn.ended_at > latest.ended_at else latest


def _check_locks(lines: Iterable[Line]) -> Iterator[Violation]:
    for line in lines:
        if line["what"] == "busy":
            yield Violation("lock", f"GPU {line['gpu']}: {line['worker']} was granted it, and its lock was taken")


def check_fences(turns: Sequence[Turn]) -> Iterator[Violation]:
    """What is granted later has the higher fence."""
    served = [turn for turn in turns if turn.is_served]
    by_fence: dict[int, Turn] = {}
    for turn in served:
        other = by_fence.setdefault(turn.fence, turn)
        if other is not turn:
            yield Violation("fence", f"{turn} and {other} have the same fence")
    for holders in _by_gpu(turns).values():
        for earlier, later in pairwise(holders):
            if later.fence < earlier.fence:
                yield Violation("fence", f"on GPU {later.gpu}, {later} came after {earlier}")
    for later in served:
        for earlier in served:
            if earlier.began_at < later.asked_at and later.fence < earlier.fence and earlier.uuid != later.uuid:
                yield Violation("fence", f"{later} was asked for when {earlier} was held already")


# --- first come, first served --------------------------------------------------------------------------------------


def ordered_pairs(turns: Sequence[Turn]) -> Iterator[tuple[Turn, Turn]]:
    """Pairs of which the first certainly came first: it was told that it is in the queue before the other one asked,
    and was not served by then, so that both waited at once.
    """
    served = [turn for turn in turns if turn.is_served]
    for first in served:
        for second in served:
            if first.queued_at < second.asked_at < first.began_at:
                yield first, second


def check_order(turns: Sequence[Turn]) -> Iterator[Violation]:
    """Whoever certainly came first was served first. The fences tell who was: the server counts its grants."""
    for first, second in ordered_pairs(turns):
        if first.fence > second.fence:
            yield Violation("order", f"{second} was served before {first}, which had been in the queue for longer")


def check_unserved(turns: Iterable[Turn], pool: Line | None) -> Iterator[Violation]:
    """Nobody waits while a GPU is free, and nobody is forgotten."""
    known = {lease["id"] for lease in (*pool["leases"], *pool["queue"])} if pool else set()
    free = [gpu["gpu_id"] for gpu in pool["gpus"] if gpu["state"] == "free"] if pool else []
    for turn in turns:
        if turn.is_served or turn.was_killed:
            continue
        if turn.lease not in known:
            yield Violation("unserved", f"{turn} was never served")
        elif free:
            yield Violation("unserved", f"{turn} was not served, and GPU {free[0]} is free")


# --- through deaths and restarts -----------------------------------------------------------------------------------


def _check_lost(lines: Iterable[Line]) -> Iterator[Violation]:
    for line in lines:
        if line["what"] == "lost":
            yield Violation("lost", f"{line['worker']} lost GPU {line['gpu']}: {line['reason']}")
        elif line["what"] == "failed":
            yield Violation("lost", f"{line['worker']} could not go on: {line['reason']}")


def _check_dead_holder(turns: Sequence[Turn]) -> Iterator[Violation]:
    handed_on = {id(handover.before) for handover in handovers(turns)}
    for turn in turns:
        if turn.was_killed and turn.is_served and id(turn) not in handed_on:
            waited = any(other.queued_at < turn.ended_at < other.began_at for other in turns)
            if waited:
                yield Violation("dead_holder", f"GPU {turn.gpu} of {turn}, which was killed, was not handed on")


def survival(turns: Iterable[Turn], outage: Outage) -> Survival:
    """What became of what there was when the server was killed."""
    held, waiting = _at(turns, outage.killed_at)
    kept = sum(_why_not_kept(turn, outage) is None for turn in held)
    places_kept = sum(_why_no_place(turn, outage) is None for turn in waiting)
    return Survival(len(held), kept, len(waiting), places_kept)


def check_survival(turns: Iterable[Turn], outage: Outage) -> Iterator[Violation]:
    """Every lease and every place in the queue is there after the restart, unless its holder gave it back himself."""
    held, waiting = _at(turns, outage.killed_at)
    for turn in held:
        if why := _why_not_kept(turn, outage):
            yield Violation("lost", f"after the restart, the lease of {turn} on GPU {turn.gpu} {why}")
    for turn in waiting:
        if why := _why_no_place(turn, outage):
            yield Violation("lost", f"after the restart, the place of {turn} in the queue {why}")


def _at(turns: Iterable[Turn], time: float) -> tuple[list[Turn], list[Turn]]:
    """Those who held a GPU, and those who had been told that they wait, at this time."""
    there = [turn for turn in turns if turn.ended_at > time]
    held = [turn for turn in there if turn.began_at <= time]
    return held, [turn for turn in there if turn.queued_at <= time < turn.began_at]


def _why_not_kept(turn: Turn, outage: Outage) -> str | None:
    found = outage.found.get(turn.lease)
    if found is None:
        return "is unknown"
    gpus = [gpu["uuid"] for gpu in found["gpus"]]
    if found["fence"] != turn.fence or gpus != [turn.uuid]:
        return f"is on {', '.join(gpus) or 'no GPU'} with fence {found['fence']}, not on {turn.uuid} with {turn.fence}"
    return None if found["state"] == "active" else _why_over(turn, outage, found)


def _why_no_place(turn: Turn, outage: Outage) -> str | None:
    found = outage.found.get(turn.lease)
    if found is None:
        return "is unknown"
    return None if found["state"] in {"queued", "active"} else _why_over(turn, outage, found)


def _why_over(turn: Turn, outage: Outage, found: Line) -> str | None:
    if found["end_reason"] in BY_THE_HOLDER and turn.ended_at <= outage.found_at:
        return None
    return f"is {found['end_reason']}"


# --- figures -------------------------------------------------------------------------------------------------------


def handovers(turns: Iterable[Turn]) -> list[Handover]:
    """From the one on a GPU to the next one there who was in the queue already when it came free."""
    return [
        Handover(before, after)
        for holders in _by_gpu(turns).values()
        for before, after in pairwise(holders)
        if after.queued_at < before.ended_at < inf
    ]


def spans_outage(turn: Turn, outage: Outage | None) -> bool:
    """Whether the server was away for some of the time in which this request was open."""
    return outage is not None and turn.asked_at < outage.back_at and turn.began_at > outage.killed_at


def quantile(values: Sequence[float], fraction: float) -> float | None:
    """The smallest of these that so large a part of them does not exceed; None where there are none."""
    if not values:
        return None
    rank = -(-fraction * len(values) // 1)
    return sorted(values)[max(int(rank) - 1, 0)]


def _by_gpu(turns: Iterable[Turn]) -> dict[str, list[Turn]]:
    """Who held each GPU, in the order in which they began."""
    found: dict[str, list[Turn]] = defaultdict(list)
    for turn in sorted(turns, key=lambda turn: turn.began_at):
        if turn.is_served:
            found[turn.uuid].append(turn)
    return found
