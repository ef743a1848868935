"""What became of each line of a batch: as lines while it runs, and as a table or JSON at the end."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from time import time
from typing import Any, Final

from gpu_worker_pool.cli.live import StatusLine
from gpu_worker_pool.cli.output import OutputClosed, Text, err, out, plain, print_json
from gpu_worker_pool.cli.table import Table, make_table, print_table
from gpu_worker_pool.cli.units import show_duration
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.jobs.job_store import JobRecord
from gpu_worker_pool.jobs.life import JobEvent, JobLife, JobState, TaskEnded, TaskStarted
from gpu_worker_pool.wire.reader import read_time

from .lines import Line

_MAX_IN_SUMMARY: Final = 50
_KEPT: Final = ("exit_code", "why", "gpus", "started_at", "ended_at", "log", "end_reason")


class State(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    DONE_BEFORE = "done before"
    FAILED = "failed"


_COLOURS: Final = {State.DONE: "green", State.DONE_BEFORE: "dim", State.FAILED: "red", State.WAITING: "yellow"}
_STATES: Final = {
    JobState.RUNNING: State.RUNNING,
    JobState.ENDED: State.DONE,
    JobState.FAILED: State.FAILED,
    JobState.INTERRUPTED: State.FAILED,
}


@dataclass(frozen=True, slots=True)
class LineView:
    """A line, as it is shown; `facts` are those of its last attempt, None of one that has none."""

    line: Line
    state: State
    attempts: int = 0
    facts: Mapping[str, Any] | None = None

    @property
    def how(self) -> str:
        facts = self.facts or {}
        if facts.get("exit_code") == 0 and facts.get("end_reason") is None:
            return "ok"
        return str(facts.get("why") or f"exit code {facts.get('exit_code')}")

    @property
    def took(self) -> str:
        times = [read_time(str((self.facts or {}).get(name))) for name in ("started_at", "ended_at")]
        began, ended = times
        return "" if began is None or ended is None else show_duration(max(ended - began, 0.0))

    @property
    def gpus(self) -> str:
        return ", ".join(map(str, (self.facts or {}).get("gpus") or ()))


class Attempts:
    """The attempts of a batch, out of the events of its journal as they come: a record for the state file each."""

    def __init__(self, record: JobRecord, keys: Mapping[int, str]) -> None:
        self._record = record
        self._keys = keys
        self._started: dict[int, TaskStarted] = {}
        self._numbers: Counter[int] = Counter()

    def ended(self, events: Iterable[JobEvent]) -> Iterator[tuple[TaskEnded, dict[str, Any]]]:
        """What has ended, with its record."""
        for event in events:
            if isinstance(event, TaskStarted) and event.index is not None:
                self._started[event.index] = event
                self._numbers[event.index] += 1
            elif isinstance(event, TaskEnded) and event.index is not None:
                index, started = event.index, self._started[event.index]
                facts = attempt_facts(self._record, index, started.run, started.at, event)
                command = self._record.spec.command_of(index)[-1]
                about = {"job": self._keys.get(index), "line": index, "command": command}
                yield event, {**about, "attempt": self._numbers[index], **facts}


def attempt_facts(
    record: JobRecord, index: int, run_id: str | None, started_at: float | None, end: JobLife | TaskEnded
) -> dict[str, Any]:
    """What is kept of an attempt at a line."""
    run = record.submission.runs.get(run_id or "")
    ended_at, state = (end.ended_at, end.state) if isinstance(end, JobLife) else (end.at, end.becomes)
    return {
        "exit_code": end.exit_code,
        "why": end.why,
        "gpus": [] if run is None else list(run.gpus),
        "started_at": iso_time(started_at),
        "ended_at": iso_time(ended_at),
        "log": os.path.relpath(record.log_of(index, 1), record.spec.cwd),
        "end_reason": "cancelled" if state is JobState.CANCELLED else end.end_reason,
    }


class Progress:
    """The lines of a batch: those that were done before, by the records of the state file, and those of its submission."""

    def __init__(self, lines: Sequence[Line], done_before: Mapping[str, Mapping[str, Any]], logs: Path) -> None:
        self.lines = lines
        self._before = done_before
        self._logs = logs
        self.record: JobRecord | None = None
        self._line = StatusLine() if err().is_terminal else None

    def to_run(self) -> list[Line]:
        return [line for line in self.lines if line.key not in self._before]

    def view(self, line: Line) -> LineView:
        if (kept := self._before.get(line.key)) is not None:
            return LineView(line, State.DONE_BEFORE, 0, kept)
        if self.record is None or not self.record.submission.has(line.number):
            return LineView(line, State.WAITING)
        life = self.record.submission.life(line.number)
        state = _STATES.get(life.state, State.WAITING)
        facts = attempt_facts(self.record, line.number, life.run, life.started_at, life)
        return LineView(line, state, life.tries or life.attempts, facts if life.attempts or life.why else None)

    def count(self, *states: State) -> int:
        return sum(self.view(line).state in states for line in self.lines)

    @property
    def done(self) -> int:
        submission = self.record.submission if self.record is not None else None
        return len(self.lines) - len(self.to_run()) + (submission.counts[JobState.ENDED] if submission else 0)

    def log_of(self, line: Line) -> Path:
        return line.log_in(self._logs)

    # --- while it runs -------------------------------------------------------------------------------------------------

    def tell_end(self, line: Line, facts: Mapping[str, Any], over: int, *, is_again: bool) -> None:
        """Print what became of an attempt; `over` lines are over."""
        view = LineView(line, State.DONE, 1, facts)
        where = f" on GPU {view.gpus}" if view.gpus else ""
        took = f" in {view.took}" if view.took else ""
        what = f"[{over}/{len(self.lines)}] {view.how}{', again later' if is_again else ''}: line {line.number}{where}{took}"
        self.close()
        with suppress(BrokenPipeError, OutputClosed):  # a reader that is gone is no reason to stop the batch
            text = f"gpu-pool: {plain(what)}: {shown(line.command)}"
            if self._line is None:  # as quick as can be
                print(text, file=sys.stderr)  # noqa: T201 - what it is for
            else:
                style = "" if view.how == "ok" else "red"
                err().print(Text(text, style=style, is_line=True))

    def show_running(self) -> None:
        """On a terminal, show how far it is, and what runs."""
        if self._line is None or self.record is None:
            return
        by_number = {line.number: line for line in self.lines}
        running = [
            f"line {life.key.index} ({show_duration(time() - (life.started_at or 0.0))}): "
            f"{shown(by_number[life.key.index or 0].command)}"
            for life in self.record.submission.running()
        ]
        more = f" and {len(running) - 1} more" if len(running) > 1 else ""
        self._line.show(f"{self.done}/{len(self.lines)} done{f'; {running[0]}{more}' if running else ''}")

    def close(self) -> None:
        if self._line is not None:
            self._line.close()

    # --- at the end ----------------------------------------------------------------------------------------------------

    def print_summary(self, state: Path | None, exit_code: int, *, is_json: bool) -> None:
        views = [self.view(line) for line in self.lines]
        counts = {state: sum(view.state is state for view in views) for state in State}
        not_run, failed = counts[State.WAITING] + counts[State.RUNNING], counts[State.FAILED]
        if is_json:
            print_json(
                "batch",
                {
                    "exit_code": exit_code,
                    "jobs": [self._json(view) for view in views],
                    "done": counts[State.DONE],
                    "done_before": counts[State.DONE_BEFORE],
                    "failed": failed,
                    "not_run": not_run,
                    "logs": str(self._logs),
                    "state": None if state is None else str(state),
                },
            )
            return
        console = out()
        print_table(console, summary_table(views, self._logs))
        rest = f", {not_run} not run" if not_run else ""
        console.print(f"{self.done} of {len(self.lines)} done, {failed} failed{rest}")
        if (not_run or failed) and state is not None:
            console.print("Run the same command again for the jobs that are not done.")

    def _json(self, view: LineView) -> dict[str, Any]:
        facts = view.facts or {}
        kept = {name: facts.get(name) for name in _KEPT}
        return {
            "line": view.line.number,
            "command": view.line.command,
            "state": str(view.state).replace(" ", "_"),
            "attempts": view.attempts,
            **kept,
            "gpus": list(kept["gpus"] or ()),
        }


def summary_table(views: Sequence[LineView], logs: Path) -> Table:
    """Every line; where there are too many to show, the first that failed."""
    found = list(views)
    if len(found) > _MAX_IN_SUMMARY:
        found = [view for view in found if view.state is State.FAILED][:_MAX_IN_SUMMARY]
    table = make_table("LINE", "STATE", "TRIES", "GPU", "TIME", "HOW", "COMMAND", "LOG")
    for view in found:
        table.add_row(
            str(view.line.number),
            Text(view.state, style=_COLOURS.get(view.state, "")),
            str(view.attempts or "-"),
            view.gpus or "-",
            view.took or "-",
            Text(plain(view.how) if view.facts else "-"),
            Text(shown(view.line.command), is_line=True),
            Text(plain(view.line.log_in(logs)) if view.facts else "-"),
        )
    return table


def shown(command: str) -> str:
    """The command without what a terminal would obey."""
    return plain(command.replace("\t", " "))
