"""The display of a batch while it runs, and its summary."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from time import time
from typing import Any

from gpu_worker_pool.cli.live import Live
from gpu_worker_pool.cli.output import Console, OutputClosed, Text, out, plain, print_json
from gpu_worker_pool.cli.run.attempt import Outcome
from gpu_worker_pool.cli.table import Table, make_table, print_table
from gpu_worker_pool.cli.units import show_duration

from .jobs import Batch, Job, State
from .jobs import Progress as JobProgress
from .runner import Started, log_path

_COLOURS = {State.DONE: "green", State.DONE_BEFORE: "dim", State.FAILED: "red", State.WAITING: "yellow"}
_MAX_SHOWN = 10
_MAX_IN_SUMMARY = 50


def outcome_text(outcome: Outcome) -> str:
    if outcome.is_good:
        return "ok"
    return outcome.why or f"exit code {outcome.exit_code}"


def _shown(command: str) -> str:
    """The command without what a terminal would obey."""
    return plain(command.replace("\t", " "))


class BatchDisplay:
    """On a terminal, a live bar with the running jobs; elsewhere, a line for each attempt that ends."""

    def __init__(self, batch: Batch, console: Console) -> None:
        self._batch = batch
        self._console = console
        self.running: Mapping[str, Started] = {}
        self._live = Live(console) if console.is_terminal else None

    def shown(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._live is None else contextlib.closing(self._live)

    def attempt_ended(self, job: Job, outcome: Outcome) -> None:
        batch = self._batch
        over = batch.done + batch.count(State.FAILED)
        again = ", again later" if batch.progress[job.key].state is State.WAITING else ""
        took = "" if outcome.took_s is None else f" in {show_duration(outcome.took_s)}"
        where = f" on GPU {', '.join(map(str, outcome.gpus))}" if outcome.gpus else ""
        what = f"[{over}/{len(batch.jobs)}] {outcome_text(outcome)}{again}: line {job.line}{where}{took}"
        text = f"gpu-pool: {plain(what)}: {_shown(job.command)}"
        if self._live is not None:
            self._live.close()
        with contextlib.suppress(OutputClosed):  # a reader that is gone is no reason to stop the batch
            self._console.print(text, "" if outcome.is_good else "red")
            if self._live is not None:
                self._live.show(self._lines(over))

    def _lines(self, over: int) -> list[str]:
        running = list(self.running.values())
        shown = [
            f"line {each.job.line}  GPU {', '.join(map(str, each.gpus))}  {show_duration(time() - each.started_at)}  "
            f"{_shown(each.job.command)}"
            for each in running[:_MAX_SHOWN]
        ]
        more = [f"and {len(running) - _MAX_SHOWN} more"] if len(running) > _MAX_SHOWN else []
        return [f"{over} of {len(self._batch.jobs)} jobs are over", *shown, *more]


def print_summary(batch: Batch, logs: Path, state: Path | None, exit_code: int, *, is_json: bool) -> None:
    if is_json:
        print_json("batch", summary_json(batch, logs, state, exit_code))
        return
    console = out()
    print_table(console, summary_table(batch, logs))
    not_run = batch.count(State.WAITING)
    rest = f", {not_run} not run" if not_run else ""
    console.print(f"{batch.done} of {len(batch.jobs)} done, {batch.count(State.FAILED)} failed{rest}")
    if not_run or batch.count(State.FAILED):
        console.print("Run the same command again for the jobs that are not done." if state else "")


def summary_table(batch: Batch, logs: Path) -> Table:
    """Every job; where there are too many to show, the first that failed."""
    found = list(batch.progress.values())
    if len(found) > _MAX_IN_SUMMARY:
        found = [item for item in found if item.state is State.FAILED][:_MAX_IN_SUMMARY]
    table = make_table("LINE", "STATE", "TRIES", "GPU", "TIME", "HOW", "COMMAND", "LOG", whole=("LINE", "STATE"))
    for item in found:
        outcome = item.outcome
        table.add_row(
            str(item.job.line),
            Text(item.state, style=_COLOURS.get(item.state, "")),
            str(item.attempts or "-"),
            ", ".join(map(str, outcome.gpus)) if outcome and outcome.gpus else "-",
            show_duration(outcome.took_s) if outcome and outcome.took_s is not None else "-",
            Text(plain(outcome_text(outcome)) if outcome else "-"),
            Text(_shown(item.job.command)),
            Text(plain(_log(item, logs) or "-")),
        )
    return table


def summary_json(batch: Batch, logs: Path, state: Path | None, exit_code: int) -> dict[str, Any]:
    return {
        "exit_code": exit_code,
        "jobs": [_job_json(item, logs) for item in batch.progress.values()],
        "done": batch.count(State.DONE),
        "done_before": batch.count(State.DONE_BEFORE),
        "failed": batch.count(State.FAILED),
        "not_run": batch.count(State.WAITING),
        "logs": str(logs),
        "state": None if state is None else str(state),
    }


def _job_json(item: JobProgress, logs: Path) -> dict[str, Any]:
    return {
        "line": item.job.line,
        "command": item.job.command,
        "state": str(item.state).replace(" ", "_"),
        "attempts": item.attempts,
        **(item.outcome or Outcome(None)).as_json(),
        "log": _log(item, logs),
    }


def _log(item: JobProgress, logs: Path) -> str | None:
    if item.outcome is not None and item.outcome.log is not None:
        return item.outcome.log
    return str(log_path(logs, item.job)) if item.attempts else None
