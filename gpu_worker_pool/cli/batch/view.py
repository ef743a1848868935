"""The display of a batch while it runs, and its summary."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from time import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gpu_worker_pool.cli.output import out, plain, print_json
from gpu_worker_pool.cli.run.attempt import Outcome
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
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._task = self._bar.add_task("jobs", total=len(batch.jobs), completed=batch.done)

    def shown(self) -> AbstractContextManager[object]:
        if not self._console.is_terminal:
            return contextlib.nullcontext()
        return Live(get_renderable=self._render, console=self._console, refresh_per_second=4, transient=True)

    def attempt_ended(self, job: Job, outcome: Outcome) -> None:
        batch = self._batch
        over = batch.done + batch.count(State.FAILED)
        self._bar.update(self._task, completed=over)
        again = ", again later" if batch.progress[job.key].state is State.WAITING else ""
        took = "" if outcome.took_s is None else f" in {show_duration(outcome.took_s)}"
        where = f" on GPU {', '.join(map(str, outcome.gpus))}" if outcome.gpus else ""
        what = f"[{over}/{len(batch.jobs)}] {outcome_text(outcome)}{again}: line {job.line}{where}{took}"
        text = f"gpu-pool: {plain(what)}: {_shown(job.command)}"
        line = Text(text, style="" if outcome.is_good else "red", no_wrap=True, overflow="ellipsis")
        with contextlib.suppress(BrokenPipeError):  # a reader that is gone is no reason to stop the batch
            self._console.print(line)

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for started in list(self.running.values())[:_MAX_SHOWN]:
            table.add_row(
                Text(f"line {started.job.line}", style="bold"),
                f"GPU {', '.join(map(str, started.gpus))}",
                show_duration(time() - started.started_at),
                Text(_shown(started.job.command), no_wrap=True, overflow="ellipsis"),
            )
        if len(self.running) > _MAX_SHOWN:
            table.add_row(f"and {len(self.running) - _MAX_SHOWN} more")
        return Group(self._bar, table)


def print_summary(batch: Batch, logs: Path, state: Path | None, exit_code: int, *, is_json: bool) -> None:
    if is_json:
        print_json("batch", summary_json(batch, logs, state, exit_code))
        return
    console = out()
    console.print(summary_table(batch, logs))
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
    table = Table(box=None, header_style="bold")
    for column in ("LINE", "STATE", "TRIES", "GPU", "TIME", "HOW", "COMMAND", "LOG"):
        table.add_column(column, no_wrap=column == "COMMAND", overflow="ellipsis" if column == "COMMAND" else "fold")
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
