"""What a crowd's lines say: who was on a GPU together with somebody else, who was overtaken, and what a death cost."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Two that ask within this time may come to the server in another order, and so may two answers come to the clients.
MARGIN_S = 0.1

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """What the witness and the clocks of a crowd testify."""

    grants: int
    twice: int
    overtaken: int
    most_places: int
    longest_wait_s: float
    # After the death of a holder until its GPU was used again; None where nobody was killed or it never was.
    reused_s: float | None
    has_victim: bool
    # How long others were still granted GPUs after that death.
    watched_s: float


def judge(rows: Sequence[Row], margin_s: float = MARGIN_S) -> Verdict:
    """Of all that was granted. Rows have when it was `asked` and `granted`, which `gpu`, and whether somebody else was on it."""
    overtaken = places(rows, margin_s)
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
        overtaken=sum(number > 0 for number in overtaken),
        most_places=max(overtaken, default=0),
        longest_wait_s=max((row["granted"] - row["asked"] for row in rows), default=0.0),
        reused_s=min(reused, default=None),
        has_victim=bool(killed),
        watched_s=max((row["granted"] - victim["killed"] for victim in killed for row in rows), default=0.0),
    )


def places(rows: Sequence[Row], margin_s: float) -> list[int]:
    """For each, how many asked after it and were granted before it, both by more than the margin."""
    ordered = sorted(rows, key=lambda row: row["asked"])
    asked = [row["asked"] for row in ordered]
    found = []
    for row in ordered:
        first = bisect_right(asked, row["asked"] + margin_s)
        last = bisect_right(asked, row["granted"] - margin_s)
        found.append(sum(later["granted"] < row["granted"] - margin_s for later in ordered[first:last]))
    return found
