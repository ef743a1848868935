"""What each contender promises, and what of it this run has seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.contenders.order import Verdict
from benchmarks.shared.results import Cell, Results, show

# By family, from their documentation: whether leases survive a restart of the server, what the death of a holder does,
# who is next, and whether several boxes can share it.
DOCUMENTED = {
    "ours": (
        "yes: a grant is on the disk before it is answered, at full (d)",
        "on the same machine at once, else when the lease runs out (d)",
        "first come, first served, by priority (d)",
        "yes, a request waits at all of them (d)",
    ),
    "Ray": ("no: by default all ends with the head node (d)", "yes (d)", "nothing is said", "yes (d)"),
    "Redis lock": (
        "as much as Redis was told to keep: by default snapshots (d)",
        "when its timeout is over, and nobody renews it by itself (d)",
        "nothing is said",
        "yes, a lock is a name (d)",
    ),
    "Redis list": (
        "as much as Redis was told to keep: by default snapshots (d)",
        "no: what was taken from the list is gone (d)",
        "who has waited longest is next (d)",
        "yes, a GPU is a name (d)",
    ),
    "filelock": (
        "there is none",
        "yes: the system lets go of what a process had locked (d)",
        "nothing is said",
        "as far as a shared file system knows locks (d)",
    ),
    "PostgreSQL": (
        "no: a lock ends with its session (d)",
        "yes, when the connection ends (d)",
        "nothing is said; here one queue for each GPU",
        "yes, a lock is a number (d)",
    ),
    "simple-gpu-scheduler": (
        "no: what waits is in its standard input (d)",
        "yes, when the command has ended (d)",
        "in the order of the lines (d)",
        "no (d)",
    ),
    "statistics only": (
        "there is nothing to lose",
        "when it no longer shows (d)",
        "none",
        "by asking each box (d)",
    ),
}


def promises(
    results: Results, families: Sequence[str], reclaimed: Mapping[str, str], verdicts: Mapping[str, Verdict]
) -> None:
    """A table. `reclaimed` is after how long a dead holder's GPU was had, by contender; `verdicts` are those of the crowds."""
    rows: list[list[Cell]] = []
    for family in families:
        survives, dies, order, boxes = DOCUMENTED[family]
        after = {name: told for name, told in reclaimed.items() if name.startswith(family)}
        crowds = [verdict for name, verdict in verdicts.items() if name.startswith(family)]
        rows.append(
            [
                family,
                survives,
                _with(dies, [told if len(after) == 1 else f"{name}: {told}" for name, told in after.items()]),
                _with("", [f"{show(each.twice)} of {show(each.grants)}" for each in crowds]) or None,
                _with(order, [f"{show(each.overtaken_percent)} % overtaken" for each in crowds]),
                boxes,
            ]
        )
    results.table(
        "What each promises",
        [
            "", "survives a restart of the server", "frees a GPU when its holder dies", "grants of a GPU that was held",
            "order", "several boxes",
        ],
        rows,
        note="(m): measured in this run, see the tables above; (d): its documentation says so.",
    )  # fmt: skip


def _with(documented: str, measured: Sequence[str]) -> str:
    return "; ".join([*([documented] if documented else []), *(f"{one} (m)" for one in measured)])
