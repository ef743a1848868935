"""What a demo measured: from the lines of its workers to figures and broken promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from statistics import median
from typing import Any

# Whether a promise was kept (None: it could not be measured), its name, and what was measured.
Promise = tuple[bool | None, str, str]


@dataclass(slots=True)
class Turn:
    """One request of a worker, by the times at which things happened to it; it means to leave at `due_at`."""

    who: str
    turn: int
    asked_at: float
    id: str = ""
    waits_since: float = inf
    took_at: float = inf
    left_at: float = inf
    killed_at: float = inf
    due_at: float = inf
    fence: int = 0
    uuid: str = ""
    gpu: str = ""

    def __str__(self) -> str:
        return f"{self.who}'s turn {self.turn} (fence {self.fence})"

    @property
    def ended_at(self) -> float:
        return min(self.left_at, self.killed_at)


@dataclass(slots=True)
class Outage:
    """A time in which nothing was granted. `answers`: each lease that was there, by its id, as the server shows it afterwards."""

    of: str
    killed_at: float
    back_at: float = inf
    answers: dict[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class Course:
    """All that happened in a demo. `pids` are those of the workers that are ready. `left_over`: the leases when all workers had
    ended; None where no server answered.
    """

    turns: dict[tuple[str, int], Turn] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    outages: list[Outage] = field(default_factory=list)
    locks_taken: int = 0
    failures: list[str] = field(default_factory=list)
    left_over: list[str] | None = None

    def add(self, line: Mapping[str, Any]) -> Turn:
        """Take in a line of a worker; the turn that it is about."""
        key, at = (line["who"], line["turn"]), float(line["at"])
        turn = self.turns.setdefault(key, Turn(*key, at))
        match line["what"]:
            case "waits":
                turn.id, turn.waits_since = line["id"], min(turn.waits_since, at)
            case "took":
                turn.took_at, turn.id, turn.fence = at, line["id"], line["fence"]
                turn.uuid, turn.gpu, turn.due_at = line["uuid"], line["gpu"], at + line.get("for_s", 0.0)
            case "left":
                turn.left_at = float(line["left_at"])
            case "lock_taken":
                self.locks_taken += 1
            case "ready":
                self.pids[line["who"]] = line["pid"]
            case "exits":
                self.ended.add(line["who"])
            case "failed":
                self.ended.add(line["who"])
                self.failures.append(f"{line['who']}: {line['reason']}")
        return turn

    @property
    def served(self) -> list[Turn]:
        return sorted((turn for turn in self.turns.values() if turn.took_at < inf), key=lambda turn: turn.took_at)

    def open_at(self, at: float) -> tuple[list[Turn], list[Turn]]:
        """The turns that held a GPU then, and those whose workers knew that they wait."""
        held = [turn for turn in self.served if turn.took_at <= at < turn.ended_at]
        return held, [turn for turn in self.turns.values() if turn.waits_since <= at < turn.took_at]


def by_gpu(served: Iterable[Turn]) -> list[list[Turn]]:
    found: dict[str, list[Turn]] = {}
    for turn in served:
        found.setdefault(turn.uuid, []).append(turn)
    return list(found.values())


def held_twice(served: Iterable[Turn]) -> Iterator[str]:
    """Two workers that had one GPU at the same time."""
    for turns in by_gpu(served):
        last = turns[0]
        for turn in turns[1:]:
            if turn.took_at < last.ended_at:
                over_ms = 1000 * (min(last.ended_at, turn.ended_at) - turn.took_at)
                yield f"GPU {turn.gpu}: {turn} had it while {last} did, for {over_ms:.0f} ms"
            last = max(last, turn, key=lambda each: each.ended_at)


def ordered_pairs(served: Sequence[Turn]) -> list[tuple[Turn, Turn]]:
    """Pairs that waited at the same time, of which the first certainly came first."""
    return [(one, other) for one in served for other in served if one.waits_since < other.asked_at < one.took_at]


def handovers(served: Iterable[Turn]) -> list[tuple[Turn, Turn, float]]:
    """Consecutive holders of a GPU, the second of which waited when the first left or died, and the milliseconds between."""
    pairs = [pair for turns in by_gpu(served) for pair in pairwise(turns)]
    waited = [(before, after) for before, after in pairs if after.waits_since < before.ended_at < inf]
    return [(before, after, 1000 * (after.took_at - before.ended_at)) for before, after in waited]


def promises(course: Course, by_journal: Sequence[str] | None = None) -> list[Promise]:
    """What was promised, and whether it was kept. In a fleet each box has fences of its own, so who was served out of turn
    is told `by_journal`.
    """
    served, left = course.served, course.left_over
    twice, pairs = list(held_twice(served)), ordered_pairs(served)
    grown = [pair for turns in by_gpu(served) for pair in pairwise(turns)]
    shrunk = [f"{after} after {before}" for before, after in grown if after.fence <= before.fence]
    late = by_journal
    if late is None:
        late = [f"{second} before {first}" for first, second in pairs if second.fence < first.fence]
    numbers = [turn.fence for turn in served] or [0]
    return [
        (
            not twice and not course.locks_taken if served else None,
            f"GPUs held twice: {max(len(twice), course.locks_taken)}",
            "; ".join(twice) or f"of {len(served)} grants, by the workers' own records and a lock on each GPU",
        ),
        (
            not shrunk if grown else None,
            f"Fences that did not grow: {len(shrunk)}",
            "; ".join(shrunk) or f"from {min(numbers)} to {max(numbers)}, through the restart",
        ),
        (
            not late if pairs else None,
            f"Served out of turn: {len(late)}",
            "; ".join(late) or f"of {len(pairs)} pairs of requests that waited at the same time",
        ),
        _killed_worker(course),
        *(_outage(course, outage) for outage in course.outages),
        *((False, "A worker failed", failure) for failure in course.failures),
        (
            None if left is None else not left,
            "Nothing left behind",
            "the server did not answer at the end" if left is None else ", ".join(left) or "no lease when all had gone",
        ),
    ]


def _killed_worker(course: Course) -> Promise:
    name = "kill -9 of a worker"
    killed = next((turn for turn in course.served if turn.killed_at < inf), None)
    if killed is None:
        return None, name, "there was no moment at which a worker held a GPU for long enough"
    after = next(((after, took_ms) for before, after, took_ms in handovers(course.served) if before is killed), None)
    if after is not None:
        return True, name, f"{after[0].who} had GPU {killed.gpu} of {killed.who} {after[1]:.1f} ms later"
    # The workers that waited then may have been served on other GPUs.
    is_starved = any(turn.took_at == inf for turn in course.open_at(killed.killed_at)[1])
    return (False if is_starved else None), name, f"no worker that waited then got GPU {killed.gpu} of {killed.who}"


def _outage(course: Course, outage: Outage) -> Promise:
    held, waiting = course.open_at(outage.killed_at)

    def is_kept(turn: Turn) -> bool:
        lease = outage.answers.get(turn.id, {})
        if lease.get("end_reason") is not None:
            return turn.left_at < inf and lease["end_reason"] == "released"
        if turn in waiting:
            return lease.get("state") in {"queued", "active"}
        shown = [gpu["uuid"] for gpu in lease.get("gpus", ())]
        return (lease.get("state"), lease.get("fence"), shown) == ("active", turn.fence, [turn.uuid])

    kept, places = sum(map(is_kept, held)), sum(map(is_kept, waiting))
    away = f"away for {outage.back_at - outage.killed_at:.1f} s"
    text = f"{away}; {kept} of {len(held)} leases and {places} of {len(waiting)} queue positions survived"
    return (kept, places) == (len(held), len(waiting)), f"kill -9 of the {outage.of}", text


def show_results(course: Course, say: Callable[[str], None], by_journal: Sequence[str] | None = None) -> int:
    """Show the table of promises, how long workers waited, and how fast a GPU went from one to the next without the waits for a
    restart; the exit code says whether all were kept.
    """
    found = promises(course, by_journal)
    is_ok = all(is_kept is not False for is_kept, _, _ in found) and bool(course.served)
    marks = {True: "ok", False: "BROKEN", None: "-"}
    waits_s = [turn.took_at - turn.asked_at for turn in course.served]
    took_ms = [
        took_ms
        for before, after, took_ms in handovers(course.served)
        if before.killed_at == inf
        and not any(after.asked_at < one.back_at and after.took_at > one.killed_at for one in course.outages)
    ]
    rows = [
        *((marks[is_kept], name, text) for is_kept, name, text in found),
        ("", "Waits", f"median {median(waits_s or [0]):.2f} s, longest {max(waits_s, default=0):.2f} s"),
        (
            "",
            f"Hand-overs: {len(took_ms)}",
            f"median {median(took_ms or [0]):.1f} ms, longest {max(took_ms, default=0):.1f} ms",
        ),
    ]
    width = max(len(name) for _, name, _ in rows)
    verdict = "Every promise was kept. Now yours: gpu-pool serve, then gpu-pool run -- CMD"
    lines = [f"{mark:<7} {name:<{width}}  {text}" for mark, name, text in rows]
    say("\n".join(["", *lines, "", verdict if is_ok else "A promise was broken."]))
    return 0 if is_ok else 1
