"""The results of a demo, as data and as text. All of them are measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpu_worker_pool.history_check import Violation, check, check_lease_kept
from gpu_worker_pool.run_history import LeaseRecord, Line, RunHistory


@dataclass(frozen=True, slots=True)
class Record:
    lines: Sequence[Line]
    source: str
    gpus: int
    workers: int
    seed: int
    took_s: float
    # How many boxes the fleet has; 0 for one server.
    boxes: int = 0


class Outage(NamedTuple):
    """A time in which nothing was granted, because this was killed."""

    which: str
    killed_at: float
    back_at: float


def summarize(record: Record) -> dict[str, Any]:
    """The figures and the broken promises; docs/CLI.md describes each key."""
    history = RunHistory(record.lines)
    outages = _outages(history)
    turns, out_of_turn = _check_journal(history)
    served, final = history.tenures, next(history.of_kind("final"), None)
    broken = [
        *check(history, is_fleet=record.boxes > 0),
        *out_of_turn,
        *_check_course(history, len(outages) > (record.boxes > 0)),
    ]
    counts = Counter(violation.kind for violation in broken)
    waits_s = [lease.took_at - lease.asked_at for lease in served]
    fences = [lease.fence for lease in served if lease.fence is not None]
    usual_ms = [
        1000 * took_s
        for before, after, took_s in handovers(history)
        # Without the waits for the server's restart.
        if not before.was_killed
        and not any(after.asked_at < one.back_at and after.took_at > one.killed_at for one in outages)
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
        "fences": {"first": min(fences, default=None), "last": max(fences, default=None), "faults": counts["fence"]},
        "order": {"pairs": turns or sum(1 for _ in ordered_pairs(history)), "faults": counts["order"]},
        "still_waiting": sum(not lease.is_served and not lease.was_killed for lease in history.leases.values()),
        "wait_s": {"median": _quantile(waits_s, 0.5, 3), "longest": _quantile(waits_s, 1.0, 3)},
        "handover_ms": {
            "count": len(usual_ms),
            "p50": _quantile(usual_ms, 0.5, 2),
            "p99": _quantile(usual_ms, 0.99, 2),
            "longest": _quantile(usual_ms, 1.0, 2),
        },
        "killed_worker": _killed_worker(history),
        "restart": _restart(history, *outages[0][1:]) if outages and not record.boxes else None,
        "fleet": _fleet(history, record.boxes, outages, counts["lost"]) if record.boxes else None,
        "left_over": None if final is None else len(final["leases"]),
    }


def _outages(history: RunHistory) -> list[Outage]:
    killed, back = history.of_kind("server_killed"), history.of_kind("server_back")
    return [
        Outage(one.get("which", "server"), one["at"], other["at"]) for one, other in zip(killed, back, strict=False)
    ]


def _check_journal(history: RunHistory) -> tuple[int, list[Violation]]:
    """Count the grants of a fleet that were made while other requests waited, and find those out of turn. Its journal has
    one order for all boxes, and all requests of a demo are alike.
    """
    journal: Line = next(history.of_kind("journal"), {"events": []})
    turns, broken, waiting = 0, [], dict[str, int]()
    for event in journal["events"]:
        name = event.get("lease_id")
        if "seq" in event:  # it is new: queued, or granted at once
            waiting[name] = event["seq"]
        if event["kind"] in {"LeaseGranted", "LeaseEnded"} and name in waiting:
            place = waiting.pop(name)
            if event["kind"] == "LeaseGranted" and waiting:
                turns += 1
                if ahead := [other for other, before in waiting.items() if before < place]:
                    broken.append(
                        Violation("order", f"{name} was granted a GPU before {ahead[0]}, which was ahead of it")
                    )
    return turns, broken


def _check_course(history: RunHistory, was_broken: bool) -> Iterator[Violation]:
    """Check what the workers' lines do not show: that the demo killed both, and saw its end."""
    if not history.tenures:
        yield Violation("unserved", "no GPU was granted")
    elif not was_broken or not any(lease.was_killed for lease in history.tenures):
        yield Violation("not_shown", "there was no moment to kill a worker that holds a GPU, and the server")
    if _first_at(history, "final") == inf:
        yield Violation("left_over", "the server did not answer at the end")


def handovers(history: RunHistory) -> list[tuple[LeaseRecord, LeaseRecord, float]]:
    """Consecutive holders, the second of which waited when the first left or died, and the seconds in between."""
    pairs = [pair for holders in history.holders().values() for pair in pairwise(holders)]
    waited = [(before, after) for before, after in pairs if after.queued_at < before.ended_at < inf]
    return [(before, after, after.took_at - before.ended_at) for before, after in waited]


def ordered_pairs(history: RunHistory) -> Iterator[tuple[LeaseRecord, LeaseRecord]]:
    """Pairs that waited at the same time, of which the first certainly came first."""
    for first in history.tenures:
        for second in history.tenures:
            if first.queued_at < second.asked_at < first.took_at:
                yield first, second


def open_at(history: RunHistory, at: float) -> tuple[list[LeaseRecord], list[LeaseRecord]]:
    """The leases that were held at this time, and those whose workers knew that they wait."""
    there = [lease for lease in history.leases.values() if lease.left_at > at]
    held = [lease for lease in there if lease.took_at <= at]
    return held, [lease for lease in there if lease.queued_at <= at < lease.took_at]


def survival(history: RunHistory, killed_at: float) -> tuple[int, int, int, int]:
    """How many leases were held when the server was killed, and kept; how many waited, and kept their queue positions."""
    held, waiting = open_at(history, killed_at)
    kept, places_kept = (sum(not any(check_lease_kept(lease)) for lease in some) for some in (held, waiting))
    return len(held), kept, len(waiting), places_kept


def _killed_worker(history: RunHistory) -> dict[str, Any] | None:
    killed = next((lease for lease in history.tenures if lease.was_killed), None)
    if killed is None:
        return None
    facts = {"worker": killed.who, "gpu": killed.gpu_ids[0], "fence": killed.fence}
    for before, after, took_s in handovers(history):
        if before is killed:
            return {
                **facts,
                "next_worker": after.who,
                "next_fence": after.fence,
                "handover_ms": round(1000 * took_s, 2),
            }
    return {**facts, "next_worker": None, "next_fence": None, "handover_ms": None}


def _restart(history: RunHistory, killed_at: float, back_at: float) -> dict[str, Any]:
    keys = ("leases", "leases_survived", "waiting", "places_kept")
    found = zip(keys, survival(history, killed_at), strict=True)
    return {"away_s": round(back_at - killed_at, 3), **dict(found)}


def _fleet(history: RunHistory, boxes: int, outages: Sequence[Outage], lost: int) -> dict[str, Any]:
    found = []
    for outage in outages:
        granted_at = min((lease.took_at for lease in history.tenures if lease.took_at > outage.back_at), default=inf)
        grant_s = None if granted_at == inf else round(granted_at - outage.killed_at, 3)
        found.append({"of": outage.which, **_restart(history, *outage[1:]), "next_grant_s": grant_s})
    return {"boxes": boxes, "ended_wrongly": lost, "outages": found}


def _first_at(history: RunHistory, what: str) -> float:
    return next((float(line["at"]) for line in history.of_kind(what)), inf)


def _quantile(values: Sequence[float], fraction: float, digits: int) -> float | None:
    """The quantile, rounded: the smallest value that this fraction of the values does not exceed; None without values."""
    rank = int(-(-fraction * len(values) // 1))
    return round(sorted(values)[max(rank - 1, 0)], digits) if values else None


def render(summary: Mapping[str, Any]) -> RenderableType:
    """The summary as text: each promise with its measurements."""
    broken = {item["promise"] for item in summary["broken"]}
    table = Table.grid(padding=(0, 2))
    for is_no_wrap in (True, True, False):
        table.add_column(no_wrap=is_no_wrap)
    for kinds, name, text, is_measured in _promises(summary):
        kept = Text("✓", "bold green") if is_measured else Text("-", "dim")
        table.add_row(Text("✗", "bold red") if kinds & broken else kept, Text(name, "bold"), Text(text))
    for name, text in _figures(summary):
        table.add_row("", Text(name, "bold"), Text(text))
    return Group(Text(""), table, Text(""), _verdict(summary))


def _promises(summary: Mapping[str, Any]) -> Iterator[tuple[set[str], str, str, bool]]:
    """For each promise: the kinds of its violations, its name, its text, and whether it could be measured."""
    grants, fences, order = summary["grants"], summary["fences"], summary["order"]
    killed, restart, left = summary["killed_worker"], summary["restart"], summary["left_over"]
    text = f"of {grants} grants, by the workers' own records and a lock on each GPU"
    yield {"held_twice", "lock"}, f"GPUs held twice: {summary['held_twice']}", text, grants > 0
    fleet = summary["fleet"]
    text = f"from {fences['first']} to {fences['last']}, through {'all of it' if fleet else 'the restart'}"
    yield {"fence"}, f"Fences that did not grow: {fences['faults']}", text, grants > 1
    text = f"of {order['pairs']} pairs of requests that waited at the same time, one certainly longer"
    if fleet:
        text = f"of {order['pairs']} grants of all boxes while others waited, by the journal"
    yield {"order", "unserved"}, f"Served out of turn: {order['faults']}", text, order["pairs"] > 0
    is_handed_on = killed is not None and killed["next_worker"] is not None
    yield {"dead_holder", "not_shown"}, "kill -9 of a worker", _killed_text(killed), is_handed_on
    if fleet is None:
        yield {"lost", "not_shown"}, "kill -9 of the server", _restart_text(restart), restart is not None
    else:
        text = f"of {grants}: each ended by its holder, or with it"
        yield {"lost"}, f"Leases ended wrongly: {fleet['ended_wrongly']}", text, grants > 0
        for outage in fleet["outages"]:
            yield {"lost", "not_shown"}, f"kill -9 of the {outage['of']}", _outage_text(outage), True
    text = f"{'?' if left is None else left} leases when all had gone"
    yield {"left_over"}, "Nothing left behind", text, left is not None


def _killed_text(killed: Mapping[str, Any] | None) -> str:
    if killed is None:
        return "no worker was killed"
    if killed["next_worker"] is None:
        return f"no worker waited for GPU {killed['gpu']} of {killed['worker']}"
    took = f"{killed['handover_ms']:.1f} ms"
    return f"GPU {killed['gpu']} of {killed['worker']} was {killed['next_worker']}'s {took} later"


def _restart_text(restart: Mapping[str, Any] | None) -> str:
    if restart is None:
        return "the server was not killed"
    return (
        f"away for {restart['away_s']:.1f} s; {restart['leases_survived']} of {restart['leases']} leases and "
        f"{restart['places_kept']} of {restart['waiting']} queue positions survived"
    )


def _outage_text(outage: Mapping[str, Any]) -> str:
    again = "never" if outage["next_grant_s"] is None else f"{outage['next_grant_s']:.1f} s later"
    return (
        f"a box led again after {outage['away_s']:.1f} s, the next grant was {again}; {outage['leases_survived']} of "
        f"{outage['leases']} leases and {outage['places_kept']} of {outage['waiting']} queue positions survived"
    )


def _figures(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    wait, handover = summary["wait_s"], summary["handover_ms"]
    if wait["median"] is not None:
        still = f"; {summary['still_waiting']} still waited at the end" if summary["still_waiting"] else ""
        yield "Waits", f"median {wait['median']:.2f} s, longest {wait['longest']:.2f} s{still}"
    if handover["count"]:
        times = f"p50 {handover['p50']:.1f} ms, p99 {handover['p99']:.1f} ms"
        yield f"Hand-overs: {handover['count']}", f"{times}, from the release to the next holder"


def _verdict(summary: Mapping[str, Any]) -> RenderableType:
    took = f"{summary['took_s']:.1f} s"
    if summary["is_ok"]:
        serve = "gpu-pool serve --fleet postgresql://…" if summary["fleet"] else "gpu-pool serve"
        after = Text.assemble("Now yours: ", (serve, "bold"), ", then ", ("gpu-pool run -- CMD", "bold"))
        return Group(Text(f"Every promise was kept ({took}).", "bold green"), after)
    lines = [Text(f"  {item['promise']}: {item['text']}", "red") for item in summary["broken"]]
    return Group(Text(f"A promise was broken ({took}):", "bold red"), *lines)
