"""Where the time of a lease + release goes: parts of it that were measured apart, in the rounds in which it was."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.shared.results import Cell, Results, duration

# Why that is not done in the event loop's thread, which would be quicker.
ON_PURPOSE = "a disk that hangs must not keep the server from taking signs of life"


@dataclass(frozen=True)
class Parts:
    """Medians. What our own work takes is measured with the commits written in the same thread."""

    whole_s: float
    floor_s: float
    own_s: float
    handing_s: float

    @classmethod
    def of(
        cls, whole: Sequence[float], floor: Sequence[float], thread: Sequence[float], inline: Sequence[float]
    ) -> Parts:
        # By rounds: a difference of two that share a round has less of its noise.
        handing = [one - other for one, other in zip(thread, inline, strict=True)]
        return cls(*map(statistics.median, (whole, floor, inline, handing)))

    @property
    def rest_s(self) -> float:
        """What is in none of them."""
        return self.whole_s - self.floor_s - self.own_s - self.handing_s

    def why(self, redis_s: float) -> str:
        """The reason for taking longer than that."""
        handing = duration(self.handing_s) if self.handing_s > 0 else "less than the rounds differ by"
        return (
            f"see where the time goes: of {duration(self.whole_s)} the floor of HTTP is {duration(self.floor_s)}; our own "
            f"work in one thread, commits included, is {duration(self.own_s)}, which alone is {self.own_s / redis_s:.2f} x; "
            f"handing the commits to a thread and back is {handing}, and on purpose: {ON_PURPOSE}; the rest was not taken apart"
        )


ROWS: tuple[tuple[str, Callable[[Parts], float]], ...] = (
    ("the floor of HTTP: two calls of a bare ASGI handler", lambda parts: parts.floor_s),
    ("our own work in one thread, commits included", lambda parts: parts.own_s),
    ("handing the two commits to the writer's thread and back", lambda parts: parts.handing_s),
    ("the rest, which is in none of these", lambda parts: parts.rest_s),
    ("all of it, over HTTP", lambda parts: parts.whole_s),
)


def where_the_time_goes(results: Results, parts: Mapping[str, Parts]) -> None:
    """A table of them, by their names."""
    rows: list[list[Cell]] = []
    for what, part_s in ROWS:
        cells = [(duration(part_s(each)), f"{100 * part_s(each) / each.whole_s:.0f} %") for each in parts.values()]
        rows.append([what, *(text for pair in cells for text in pair)])
    results.table(
        "Where the time goes: a lease + release, one client",
        ["", *(text for name in parts for text in (name, "share"))],
        rows,
        note="Our own work: the same app is called in its own process, without HTTP, and writes its journal in the event "
        "loop's thread. Handing over: what it takes longer with the thread that the server has, by rounds. That thread is "
        f"there on purpose: {ON_PURPOSE}. The rest was not taken apart.",
    )
