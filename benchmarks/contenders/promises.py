"""What each contender promises, and what this run has seen of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.contenders.order import Verdict
from benchmarks.shared.results import Cell, Results, show

# By family, from their documentation: whether leases survive a restart of the server, what happens when a holder dies,
# which waiter is next, and whether several boxes can share it.
DOCUMENTED = {
    "ours": (
        "yes: a grant is on the disk before it is answered, at full (d)",
        "on the same machine at once, else when the lease expires (d)",
        "first come, first served, by priority (d)",
        "yes, a request waits at all of them (d)",
    ),
    "Ray": ("no: by default everything ends with the head node (d)", "yes (d)", "none stated", "yes (d)"),
    "Redis lock": (
        "as much as Redis is set to keep: by default snapshots (d)",
        "when its timeout ends; nothing renews it automatically (d)",
        "none stated",
        "yes, a lock is a name (d)",
    ),
    "Redis list": (
        "as much as Redis is set to keep: by default snapshots (d)",
        "no: what was taken from the list is gone (d)",
        "the longest waiter is next (d)",
        "yes, a GPU is a name (d)",
    ),
    "filelock": (
        "there is no server",
        "yes: the system releases what a process had locked (d)",
        "none stated",
        "as far as a shared file system supports locks (d)",
    ),
    "PostgreSQL": (
        "no: a lock ends with its session (d)",
        "yes, when the connection ends (d)",
        "none stated; here one queue for each GPU",
        "yes, a lock is a number (d)",
    ),
    "simple-gpu-scheduler": (
        "no: waiting commands are in its standard input (d)",
        "yes, when the command has ended (d)",
        "the order of the input lines (d)",
        "no (d)",
    ),
    "Dask": (
        "no: tasks are in the memory of the scheduler (d)",
        "yes, but the task is run again, and takes the GPU again (d)",
        "first in, first out, by priority (d)",
        "yes (d)",
    ),
    "HyperQueue": (
        "with a journal, which the server of the wheel does not keep (d)",
        "yes, when the task has ended (d)",
        "by priority (d)",
        "yes (d)",
    ),
    "Slurm": (
        "yes: jobs that run go on, and the queue is saved (d)",
        "yes, when the job has ended (d)",
        "first come, first served, by priority; shorter jobs may fill gaps (d)",
        "yes (d)",
    ),
    "statistics only": (
        "there is nothing to lose",
        "when the statistics no longer show it (d)",
        "none",
        "by asking each box (d)",
    ),
}


def promises(
    results: Results,
    families: Sequence[str],
    reclaimed: Mapping[str, str],
    verdicts: Mapping[str, Verdict],
    restarted: Mapping[str, str],
) -> None:
    """Add a table. By contender, `reclaimed` says how soon a dead holder's GPU was granted, `restarted` what a restart kept;
    `verdicts` are those of the crowds.
    """
    rows: list[list[Cell]] = []
    for family in (each for each in families if each in DOCUMENTED):
        survives, dies, order, boxes = DOCUMENTED[family]
        after, kept = (_told(family, seen) for seen in (reclaimed, restarted))
        crowds = [verdict for name, verdict in verdicts.items() if name.startswith(family)]
        rows.append(
            [
                family,
                _with(survives, kept),
                _with(dies, after),
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
        note="(m): measured in this run, see the tables above; (d): stated in its documentation.",
    )  # fmt: skip


def _told(family: str, seen: Mapping[str, str]) -> list[str]:
    """Return what was seen of the contenders of a family, with their names if there are several."""
    found = {name: told for name, told in seen.items() if name.startswith(family)}
    return [told if len(found) == 1 else f"{name}: {told}" for name, told in found.items()]


def _with(documented: str, measured: Sequence[str]) -> str:
    return "; ".join([*([documented] if documented else []), *(f"{one} (m)" for one in measured)])
