"""The verdict on a crowd: GPUs that were held twice, clients that were overtaken, and what a death cost."""

from __future__ import annotations

import json
import sqlite3
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from benchmarks.shared.results import Cell, duration, show
from benchmarks.shared.rounds import percentile

# Two requests within this time may reach the server in another order, and so may two answers reach the clients, because a
# process may wait that long until it runs. Each crowd says how late its processes were (`late_p99_s`). A queue that surely
# keeps its order (BLPOP of Redis) shows how many seem overtaken nevertheless.
MARGIN_S = 0.01
# While all begin at once, they wait for the processor longer than that. Clients that ask then are not judged.
BEGINNING_S = 1.0

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """What the witness files and the clocks of a crowd show."""

    grants: int
    twice: int
    # The number of grants whose order was judged.
    judged: int
    overtaken: int
    most_places: int
    longest_wait_s: float
    # From the death of a holder until its GPU was used again; None if no client was killed or the GPU was never used.
    reused_s: float | None
    has_victim: bool
    # For how long after that death other clients were still granted GPUs.
    watched_s: float
    # How long after its wake-up time a process ran again, p99; None if that was not noted.
    late_p99_s: float | None

    @property
    def overtaken_percent(self) -> float:
        return 100 * self.overtaken / max(1, self.judged)


def judge(rows: Sequence[Row], beginning_s: float = 0.0, margin_s: float = MARGIN_S) -> Verdict:
    """Judge all grants. A row says when it was `asked` and `granted`, on which `gpu`, and whether it was held `twice`.

    The order is judged for the clients that asked after the beginning.
    """
    first = min((row["asked"] for row in rows), default=0.0)
    overtaken = places([row for row in rows if row["asked"] >= first + beginning_s], margin_s)
    late = [row["late"] for row in rows if "late" in row]
    killed = [row for row in rows if "killed" in row]
    reused = [
        row["granted"] - victim["killed"]
        for victim in killed
        for row in rows
        if row["gpu"] == victim["gpu"] and row["granted"] > victim["killed"]
    ]
    return Verdict(
        grants=len(rows),
        twice=sum(row["twice"] for row in rows),
        judged=len(overtaken),
        overtaken=sum(number > 0 for number in overtaken),
        most_places=max(overtaken, default=0),
        longest_wait_s=max((row["granted"] - row["asked"] for row in rows), default=0.0),
        reused_s=min(reused, default=None),
        has_victim=bool(killed),
        watched_s=max([0.0, *(row["granted"] - victim["killed"] for victim in killed for row in rows)]),
        late_p99_s=percentile(late, 99) if late else None,
    )


def places(rows: Sequence[Row], margin_s: float) -> list[int]:
    """Return for each row how many asked after it and were granted before it, both by more than the margin."""
    ordered = sorted(rows, key=lambda row: row["asked"])
    asked = [row["asked"] for row in ordered]
    found = []
    for row in ordered:
        first = bisect_right(asked, row["asked"] + margin_s)
        last = bisect_right(asked, row["granted"] - margin_s)
        found.append(sum(later["granted"] < row["granted"] - margin_s for later in ordered[first:last]))
    return found


def out_of_order(journal: Path) -> tuple[int, int]:
    """Count in our own server's journal the grants, and those that were queued before one that was granted earlier.

    Lateness does not show there: it has the order in which requests came to the server, and in which it decided.
    """
    with closing(sqlite3.connect(f"file:{quote(str(journal))}?mode=ro", uri=True)) as connection:
        events = connection.execute("SELECT kind, body FROM event ORDER BY position").fetchall()
    queued: dict[str, int] = {}
    grants = wrong = latest = 0
    for number, (kind, body) in enumerate(events):
        event = json.loads(body)
        if kind == "LeaseQueued" or "seq" in event:  # else it is granted after it was queued
            queued[event["lease_id"]] = number
        if kind == "LeaseGranted" and (place := queued.get(event["lease_id"])) is not None:
            grants += 1
            wrong += place < latest
            latest = max(latest, place)
    return grants, wrong


def crowd_row(name: str, verdict: Verdict, seconds: float, claim: str) -> list[Cell]:
    """Return the row of a table that shows the verdict."""
    reused = "no client was killed" if not verdict.has_victim else f"not within {duration(verdict.watched_s)}"
    if verdict.reused_s is not None:
        reused = duration(verdict.reused_s)
    share = f"{show(verdict.overtaken_percent)} %"
    late = None if verdict.late_p99_s is None else duration(verdict.late_p99_s)
    wait = duration(verdict.longest_wait_s)
    return [
        name,
        f"{seconds:g} s",
        verdict.grants,
        verdict.twice,
        share,
        verdict.most_places,
        late,
        wait,
        reused,
        claim,
    ]
