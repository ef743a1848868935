"""What a demo measured: as data, and as a person reads it. Nothing in it is known beforehand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .check import (
    Line,
    Outage,
    Turn,
    Violation,
    check,
    handovers,
    ordered_pairs,
    quantile,
    spans_outage,
    survival,
    turns_of,
)


@dataclass(frozen=True, slots=True)
class Record:
    """All that is known of a demo when it is over."""

    lines: Sequence[Line]
    outage: Outage | None
    # What the server showed when the time was over and some had not ended; None where all had.
    waiting_pool: Mapping[str, Any] | None
    # What it showed when everybody had gone; None where it did not answer.
    last_pool: Mapping[str, Any] | None
    source: str
    gpus: int
    workers: int
    seed: int
    took_s: float


def summarize(record: Record) -> dict[str, Any]:
    """The figures, and what was broken; docs/CLI.md describes each key."""
    turns = turns_of(record.lines)
    served = [turn for turn in turns if turn.is_served]
    broken = [*check(record.lines, record.outage, record.waiting_pool), *_check_course(record, served)]
    counts = Counter(violation.kind for violation in broken)
    waits_s = [turn.began_at - turn.asked_at for turn in served]
    all_handovers = handovers(turns)
    usual_ms = [
        1000 * handover.took_s
        for handover in all_handovers
        if not handover.before.was_killed and not spans_outage(handover.after, record.outage)
    ]
    return {
        "is_ok": not broken,
        "broken": [{"promise": violation.kind, "text": violation.text} for violation in broken],
        "gpus": record.gpus,
        "source": record.source,
        "workers": record.workers,
        "seed": record.seed,
        "took_s": round(record.took_s, 2),
        "grants": len(served),
        "held_twice": counts["held_twice"],
        "locks_taken": counts["lock"],
        "fences": {
            "first": min((turn.fence for turn in served), default=None),
            "last": max((turn.fence for turn in served), default=None),
            "faults": counts["fence"],
        },
        "order": {"pairs": sum(1 for _ in ordered_pairs(turns)), "faults": counts["order"]},
        "still_waiting": sum(not turn.is_served and not turn.was_killed for turn in turns),
        "wait_s": {"median": _rounded(quantile(waits_s, 0.5), 3), "longest": _rounded(max(waits_s, default=None), 3)},
        "handover_ms": {
            "count": len(usual_ms),
            "p50": _rounded(quantile(usual_ms, 0.5), 2),
            "p99": _rounded(quantile(usual_ms, 0.99), 2),
            "longest": _rounded(max(usual_ms, default=None), 2),
        },
        "killed_worker": _killed_worker(turns),
        "restart": _restart(turns, record.outage),
        "left_over": None if record.last_pool is None else len(left_over(record.last_pool)),
    }


def _check_course(record: Record, served: Sequence[Turn]) -> Iterable[Violation]:
    """What is not in the workers' lines: that the demo did what it set out to do, and that nothing is left of it."""
    if not served:
        yield Violation("unserved", "no GPU was granted to anybody")
    elif record.outage is None or not any(turn.was_killed for turn in served):
        yield Violation("not_shown", "there was no moment to kill a worker that holds a GPU, and the server")
    if record.last_pool is None:
        yield Violation("left_over", "the server did not answer at the end")
    else:
        for what in left_over(record.last_pool):
            yield Violation("left_over", what)


def left_over(pool: Mapping[str, Any]) -> list[str]:
    """The leases there are; one that drains has ended."""
    live = [*pool["leases"], *pool["queue"]]
    return [f"lease {lease['id']} is still {lease['state']}" for lease in live if lease["state"] != "draining"]


def _killed_worker(turns: Sequence[Turn]) -> dict[str, Any] | None:
    turn = next((turn for turn in turns if turn.was_killed), None)
    if turn is None:
        return None
    after = next((handover for handover in handovers(turns) if handover.before is turn), None)
    return {
        "worker": turn.worker,
        "gpu": turn.gpu,
        "fence": turn.fence,
        "next_worker": after.after.worker if after else None,
        "next_fence": after.after.fence if after else None,
        "handover_ms": round(1000 * after.took_s, 2) if after else None,
    }


def _restart(turns: Sequence[Turn], outage: Outage | None) -> dict[str, Any] | None:
    if outage is None:
        return None
    found = survival(turns, outage)
    return {
        "away_s": round(outage.back_at - outage.killed_at, 3),
        "leases": found.held,
        "leases_survived": found.kept,
        "waiting": found.waiting,
        "places_kept": found.places_kept,
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


# --- for people ----------------------------------------------------------------------------------------------------


def render(summary: Mapping[str, Any]) -> RenderableType:
    """The summary, each promise with what was measured."""
    broken = {item["promise"] for item in summary["broken"]}
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for promise in _promises(summary):
        if promise.kinds & broken:
            sign = Text("✗", "bold red")
        else:
            sign = Text("✓", "bold green") if promise.is_measured else Text("-", "dim")
        table.add_row(sign, Text(promise.name, "bold"), Text(promise.told))
    for name, told in _figures(summary):
        table.add_row("", Text(name, "bold"), told)
    return Group(Text(""), table, Text(""), _verdict(summary))


class _Promise(NamedTuple):
    """A promise, what is told of it, and whether the demo had occasion to measure it."""

    kinds: set[str]
    name: str
    told: str
    is_measured: bool


def _promises(summary: Mapping[str, Any]) -> Iterable[_Promise]:
    grants, fences, order = summary["grants"], summary["fences"], summary["order"]
    killed, restart, left = summary["killed_worker"], summary["restart"], summary["left_over"]
    yield _Promise(
        {"held_twice", "lock"},
        f"GPUs held twice: {summary['held_twice']}",
        f"of {grants} grants, by the workers' own records and a lock on each GPU",
        grants > 0,
    )
    yield _Promise(
        {"fence"},
        f"Fences that did not grow: {fences['faults']}",
        f"from {fences['first']} to {fences['last']}, through the restart",
        grants > 1,
    )
    yield _Promise(
        {"order", "unserved"},
        f"Served out of turn: {order['faults']}",
        f"of {order['pairs']} pairs of requests that waited at once, one of them surely longer",
        order["pairs"] > 0,
    )
    is_handed_on = killed is not None and killed["next_worker"] is not None
    yield _Promise({"dead_holder", "not_shown"}, "kill -9 of a worker", _tell_killed(killed), is_handed_on)
    yield _Promise({"lost", "not_shown"}, "kill -9 of the server", _tell_restart(restart), restart is not None)
    told = f"{'?' if left is None else left} leases when all had gone"
    yield _Promise({"left_over"}, "Nothing left behind", told, left is not None)


def _tell_killed(killed: Mapping[str, Any] | None) -> str:
    if killed is None:
        return "nobody was killed"
    if killed["next_worker"] is None:
        return f"nobody waited for GPU {killed['gpu']} of {killed['worker']}"
    return (
        f"GPU {killed['gpu']} of {killed['worker']} was {killed['next_worker']}'s {killed['handover_ms']:.1f} ms later"
    )


def _tell_restart(restart: Mapping[str, Any] | None) -> str:
    if restart is None:
        return "it was not killed"
    return (
        f"away for {restart['away_s']:.1f} s; {restart['leases_survived']} of {restart['leases']} leases and "
        f"{restart['places_kept']} of {restart['waiting']} places in line survived"
    )


def _figures(summary: Mapping[str, Any]) -> Iterable[tuple[str, Text]]:
    wait, handover = summary["wait_s"], summary["handover_ms"]
    if wait["median"] is not None:
        still = f"; {summary['still_waiting']} still waited at the end" if summary["still_waiting"] else ""
        yield "Waits", Text(f"median {wait['median']:.2f} s, longest {wait['longest']:.2f} s{still}")
    if handover["count"]:
        text = (
            f"p50 {handover['p50']:.1f} ms, p99 {handover['p99']:.1f} ms, from one who gives back to the next who holds"
        )
        yield f"Hand-overs: {handover['count']}", Text(text)


def _verdict(summary: Mapping[str, Any]) -> RenderableType:
    took = f"{summary['took_s']:.1f} s"
    if summary["is_ok"]:
        after = Text.assemble("Now yours: ", ("gpu-pool serve", "bold"), ", then ", ("gpu-pool run -- CMD", "bold"))
        return Group(Text(f"Every promise was kept ({took}).", "bold green"), after)
    lines = [Text(f"  {item['promise']}: {item['text']}", "red") for item in summary["broken"]]
    return Group(Text(f"A promise was broken ({took}):", "bold red"), *lines)
