"""Where the time of a lease + release goes: its parts, measured separately in the same rounds as the whole."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.shared.results import Cell, Results, duration

# Why the server does not write in the event loop's thread, which would be quicker.
ON_PURPOSE = "a disk that hangs must not stop the server from accepting heartbeats"


@dataclass(frozen=True)
class Parts:
    """Medians of the whole and its parts. Our own work is measured with the commits written in the same thread."""

    whole_s: float
    floor_s: float
    own_s: float
    handing_s: float

    @classmethod
    def of(
        cls, whole: Sequence[float], floor: Sequence[float], thread: Sequence[float], inline: Sequence[float]
    ) -> Parts:
        # By rounds: the difference of two values of one round has less of its noise.
        handing = [one - other for one, other in zip(thread, inline, strict=True)]
        return cls(*map(statistics.median, (whole, floor, inline, handing)))

    @property
    def rest_s(self) -> float:
        """The time that is in none of the parts."""
        return self.whole_s - self.floor_s - self.own_s - self.handing_s

    def why(self, redis_s: float) -> str:
        """Explain why a lease + release takes longer than Redis does."""
        handing = duration(self.handing_s) if self.handing_s > 0 else "less than the rounds differ by"
        return (
            f"see where the time goes: of {duration(self.whole_s)}, the floor of HTTP takes {duration(self.floor_s)}; our own "
            f"work in one thread, commits included, takes {duration(self.own_s)}, which alone is {self.own_s / redis_s:.2f} x; "
            f"handing the commits to a thread and back takes {handing}, on purpose: {ON_PURPOSE}; the rest was not measured "
            "separately"
        )


ROWS: tuple[tuple[str, Callable[[Parts], float]], ...] = (
    ("the floor of HTTP: two calls of a bare ASGI handler", lambda parts: parts.floor_s),
    ("our own work in one thread, commits included", lambda parts: parts.own_s),
    ("handing the two commits to the writer's thread and back", lambda parts: parts.handing_s),
    ("the rest, not measured separately", lambda parts: parts.rest_s),
    ("total, over HTTP", lambda parts: parts.whole_s),
)


def where_the_time_goes(results: Results, parts: Mapping[str, Parts]) -> None:
    """Add a table of the parts, with two columns for each name."""
    rows: list[list[Cell]] = []
    for what, part_s in ROWS:
        cells = [(duration(part_s(each)), f"{100 * part_s(each) / each.whole_s:.0f} %") for each in parts.values()]
        rows.append([what, *(text for pair in cells for text in pair)])
    results.table(
        "Where the time goes: a lease + release, one client",
        ["", *(text for name in parts for text in (name, "share"))],
        rows,
        note="Our own work: the same app is called inside its process, without HTTP, and writes its journal in the event "
        "loop's thread. Handing over: the additional time with the writer's thread that the server has, median of the "
        f"differences by round. The server has that thread on purpose: {ON_PURPOSE}.",
    )
