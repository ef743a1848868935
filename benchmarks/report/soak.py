"""The summary of a soak: fleets that run while faults are injected, and what was checked meanwhile.

A soak takes an hour and is not a part of `make bench`. `make soak` runs it, `python -m benchmarks.report --soak FILE` puts its
summary among the stored data, and later runs of the benchmarks keep it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report.markdown import Data, plain, table
from benchmarks.shared.results import duration, show

TITLE = "Soak"
MISSING = "no summary of a soak is stored; `python -m benchmarks.report --soak FILE` takes one"
# Checks of older summaries that could not fail, or counted where they had not looked, and why. They were repaired and have other
# texts since (PROMISES in tests/e2e/fleet/soak_summary.py).
TOO_WEAK = {
    "each request is served, or ends (requests)": "it left out each client that had ended, and all had",
    "nothing is left when all clients have gone (ends of a crowd)": "a pool that could not be read counted as empty",
    "no second box of one name is taken (second boxes)": "it counted boxes that were ended before they had asked a leader",
}
# Checks and faults that are as they were, by their text without what is counted, and their clearer text since.
CLEARER = {
    "the requests of one line are granted in order": (
        "requests of one owner for the same are granted in order (pairs of waiting requests)"
    ),
    "what a client was told is kept": ("what the harness's own client was told is kept (leases and queue positions)"),
    "no honest call is refused": (
        "no honest call of the harness's own client is refused, apart from 'later' and 'not here' (answers)"
    ),
    "primary lost, standby promoted while it was behind": "primary lost, standby promoted",
}
# More are not listed one by one.
MOST_SEEDS = 6
SHAPE: dict[str, type | tuple[type, ...]] = {
    "minutes": (int, float),
    "date": str,
    "commit": str,
    "seeds": list,
    "machine": str,
    "faults": dict,
    "grants": int,
    "checked": dict,
    "violations": dict,
    "take_overs_s": dict,
}
# Older summaries do not have them.
NEWER: dict[str, type] = {"hand_overs_s": dict, "of_client": dict, "commits_lost": int, "faults_that_did_not_come": int}


class NoSummaryError(Exception):
    """A file holds no summary of a soak; the text says why."""


def read(path: Path) -> dict[str, Any]:
    """Return the summary that a soak wrote. One of another shape is refused."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NoSummaryError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise NoSummaryError(f"{path} holds no JSON object")
    wrong = [name for name, kind in SHAPE.items() if not isinstance(found.get(name), kind)]
    wrong += [name for name, kind in NEWER.items() if name in found and not isinstance(found[name], kind)]
    if wrong:
        raise NoSummaryError(f"{path} is not the summary of a soak: {', '.join(wrong)} missing or of another type")
    return {name: found[name] for name in (*SHAPE, *NEWER) if name in found}


def section(found: Data) -> Iterator[str]:
    """Yield the lines of the section."""
    checked, violations = (_clearer(found[name]) for name in ("checked", "violations"))
    # A violation counts, however weak the check was that found it.
    weak = [text for text in TOO_WEAK if text in checked and not violations.get(text)]
    # A violation may be of a kind that is not counted when it is checked.
    promises = {**checked, **dict.fromkeys(violations.keys() - checked.keys())}
    rows = [[text, count, violations.get(text, 0)] for text, count in promises.items() if text not in weak]
    yield f"## {TITLE}: {show(found['minutes'])} minutes of faults"
    yield ""
    yield _told_fleets(found)
    yield ""
    yield _told_violations(rows)
    yield ""
    yield from table(["fault", "injected"], list(_clearer(found["faults"]).items()))
    yield ""
    yield from table(["promise", "checked", "violations"], rows)
    for told in (*_told_weak(weak), *_told_beside(found), *_told_take_overs(found)):
        yield ""
        yield told


def _clearer(counts: Data) -> dict[str, Any]:
    return {CLEARER.get(text.partition(" (")[0], text): number for text, number in counts.items()}


def _told_fleets(found: Data) -> str:
    fleets = len(found["seeds"])
    how = "one after the other, " if fleets > 1 else ""
    return (
        f"{_many(fleets, 'fleet')} ran, {how}for {show(found['minutes'])} minutes in all, while faults were injected. Each had a "
        "database and a journal of its own, three candidates and two other boxes on one machine with one clock, and simulated "
        "GPUs. Proxies cut the networks. PostgreSQL ran without syncs of its disk: it was killed, and the machine never lost its "
        f"power. So this says nothing on what builds up over hours. It is a run of its own, of {plain(found['date'])}, with commit "
        f"{plain(found['commit'])}, {_told_seeds(found['seeds'])}, on {plain(found['machine'])}. "
        f"It made {show(found['grants'])} grants."
    )


def _told_violations(rows: Sequence[Sequence[Any]]) -> str:
    violations = sum(row[2] for row in rows)
    unchecked = sum(row[1] == 0 for row in rows)
    told = "No violation of a promise was found."
    if violations:
        told = f"**{_many(violations, 'violation')} of a promise {'were' if violations > 1 else 'was'} found.**"
    return told + (f" {_many(unchecked, 'promise')} of the table could not be checked." if unchecked else "")


def _told_weak(weak: Sequence[str]) -> Iterator[str]:
    if weak:
        named = "; ".join(f'"{text}": {TOO_WEAK[text]}' for text in weak)
        yield (
            f"{_many(len(weak), 'check')} of this run {'are' if len(weak) > 1 else 'is'} not shown, because they were found too weak "
            f"and were repaired since. {plain(named)}."
        )


def _told_beside(found: Data) -> Iterator[str]:
    """Yield what a summary has beside promises, or lacks."""
    told = []
    if "of_client" not in found:
        told.append(
            "What clients were told is counted with the leases of the package's own client, of which only the grants are judged."
        )
    if of_client := found.get("of_client"):
        counts = ", ".join(f"{name} {show(number)}" for name, number in of_client.items())
        told.append(f"The package's own Python client met these, in crowds and while faults were injected: {counts}.")
    if "commits_lost" in found:
        told.append(
            f"Standbys that were promoted lacked {show(found['commits_lost'])} commits, which leaders wrote again."
        )
    if found.get("faults_that_did_not_come"):
        told.append(f"{_many(found['faults_that_did_not_come'], 'planned fault')} did not come.")
    if told:
        yield plain(" ".join(told))


def _told_take_overs(found: Data) -> Iterator[str]:
    """Older summaries have leaders that were told to stop among those that were broken, and count those that no other one followed."""
    of_broken = found["take_overs_s"]
    if "never" not in of_broken:
        if "median" in of_broken:
            yield (
                f"A leader was told to stop, or was broken, {show(of_broken['count'])} times while all else was well. Where another "
                f"one granted, it did so after {_told_times(of_broken)}. This run did not tell the two apart."
            )
        return
    kinds = (("was killed, frozen or cut off", of_broken), ("was told to stop", found.get("hand_overs_s", {})))
    for what, times in kinds:
        if times.get("count") or times.get("never"):
            after = f" after {_told_times(times)}" if times["count"] else ""
            never = f" In {_many(times['never'], 'case')} none did." if times["never"] else ""
            count = f"{_many(times['count'], 'time')}{after}"
            yield f"After a leader {what} while all else was well, another one granted {count}.{never}"


def _told_times(times: Data) -> str:
    shortest, middle, longest = (duration(times[name]) for name in ("min", "median", "max"))
    return f"{middle} in the median, {shortest} at least and {longest} at most"


def _many(number: int, noun: str) -> str:
    return f"{show(number)} {noun}{'s' * (number != 1)}"


def _told_seeds(seeds: Sequence[int]) -> str:
    if len(seeds) > MOST_SEEDS:
        return f"{len(seeds):,} seeds from {seeds[0]} to {seeds[-1]}"
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
