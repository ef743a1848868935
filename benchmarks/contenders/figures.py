"""The figures of the comparison: this project beside the contender that a target names, by the medians of the same rounds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.contenders.takers import REDIS_SLEEP_S
from benchmarks.shared.results import Results, duration, show
from benchmarks.shared.rounds import ratios
from benchmarks.shared.targets import middle_half, ratio

OURS, REDIS_LOCK, REDIS_LIST, POSTGRES, RAY = (
    "ours, full",
    "Redis lock",
    "Redis list",
    "PostgreSQL",
    "Ray task, max_calls=0",
)
OURS_NORMAL = "ours, normal"
CROWD = 64

Rounds = Sequence[Sequence[float]]


def hand_over_figures(results: Results, found: Mapping[str, Rounds]) -> None:
    """Compare the time from a release to the next waiter."""
    what = "release to the next waiter in another process, by our blocking Python client, relative to"
    why = _why_late(found)
    _beside(results, "hand_over_vs_blpop", f"{what} `BLPOP` of Redis", found, REDIS_LIST, most=5.0, why=why)
    ours, theirs = _medians(found, OURS), _medians(found, RAY)
    all_ratios = ratios(ours, theirs) if ours and theirs else []
    value = statistics.median(all_ratios) if all_ratios else None
    # A tie is not ahead of it.
    results.figure(
        "hand_over_vs_ray",
        f"{what} Ray (it uses its processes again)",
        value=value,
        unit="x",
        target="< 1 x",
        is_met=None if value is None else value < 1,
        spread=middle_half(all_ratios) if all_ratios else "",
        why=why if all_ratios else _missing(ours, RAY),
    )


def reclaim_figures(results: Results, found: Mapping[str, Rounds]) -> None:
    """Compare the time from the death of a holder to the next waiter."""
    what = "`kill -9` of a holder to the next waiter in another process, relative to PostgreSQL's advisory lock"
    _beside(results, "reclaim_vs_postgres", what, found, POSTGRES, most=1.2, why=_why_late(found))


def crowd_figures(results: Results, rates: Mapping[str, Rounds], shares: Sequence[float]) -> None:
    """Compare the cycles a second of many client processes. Our server used these shares of a core meanwhile, by round."""
    what = f"{CROWD} clients on 8 GPUs, full, each a process: requests + releases a second, relative to"
    for figure_id, other, named, least in (
        (
            "crowd_vs_redis",
            REDIS_LOCK,
            f"the Redis lock (it syncs nothing; its waiters pause {REDIS_SLEEP_S:g} s between tries)",
            0.5,
        ),
        ("crowd_vs_ray", RAY, "Ray (empty tasks of as many threads of one driver; it uses its processes again)", 1.5),
    ):
        why = (
            f"the server used {show(statistics.median(shares))} of a core meanwhile, and the clients the rest"
            if shares
            else ""
        )
        _beside(results, figure_id, f"{what} {named}", rates, other, least=least, why=why)


def _beside(
    results: Results,
    figure_id: str,
    what: str,
    found: Mapping[str, Rounds],
    other: str,
    *,
    most: float | None = None,
    least: float | None = None,
    why: str,
) -> None:
    ours, theirs = _medians(found, OURS), _medians(found, other)
    ratio(results, figure_id, what, ours, theirs, most=most, least=least, why=why, missing=_missing(ours, other))


def _medians(found: Mapping[str, Rounds], name: str) -> list[float]:
    return [statistics.median(values) for values in found.get(name, ())]


def _missing(ours: Sequence[float], other: str) -> str:
    return f"{other if ours else OURS} was not measured in this run"


def _why_late(found: Mapping[str, Rounds]) -> str:
    if OURS not in found:
        return ""
    ours_s = statistics.median(value for values in found[OURS] for value in values)
    at_normal = [value for values in found.get(OURS_NORMAL, ()) for value in values]
    without_disk = f", and {duration(statistics.median(at_normal))} at normal" if at_normal else ""
    return (
        f"it takes {duration(ours_s)}{without_disk}: the GPU is read, and the end and the next grant are written together; the others "
        "keep nothing"
    )
