"""What became of each line of a batch: as lines while it runs, and as a table or JSON at the end."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any, Final, NamedTuple

from gpu_worker_pool.cli.live import StatusLine
from gpu_worker_pool.cli.output import OutputClosed, Text, err, out, plain, print_json, tell
from gpu_worker_pool.cli.table import make_table, print_table
from gpu_worker_pool.cli.units import show_duration
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.jobs.job_record import JobRecord
from gpu_worker_pool.jobs.submission import JobState, JobTask
from gpu_worker_pool.wire.reader import read_time

from .lines import Line, is_good

_MAX_IN_SUMMARY: Final = 50
_DONE_BEFORE: Final = "done before"
_COLOURS: Final = {"done": "green", _DONE_BEFORE: "dim", "failed": "red", "waiting": "yellow"}
_STATES: Final = {
    JobState.RUNNING: "running",
    JobState.ENDED: "done",
    JobState.FAILED: "failed",
    JobState.INTERRUPTED: "failed",
}
# What is kept of an attempt, as far as there was one.
_KEPT: Final = ("exit_code", "why", "gpus", "started_at", "ended_at", "log", "end_reason")


def attempt_facts(record: JobRecord, task: JobTask, key: str) -> dict[str, Any]:
    """What the state file keeps of the last attempt at a line; of one that could have no GPU, why not."""
    index, run = task.index or 0, record.submission.runs.get(task.run or "")
    return {
        "job": key,
        "line": index,
        "command": record.spec.command_of(index)[-1],
        "attempt": task.attempts,
        "exit_code": task.exit_code,
        "why": task.why,
        "gpus": [] if run is None else list(run.gpus),
        "started_at": iso_time(task.started_at),
        "ended_at": iso_time(task.ended_at),
        "log": os.path.relpath(record.log_of(index, 1), record.spec.cwd),
        "end_reason": "cancelled" if task.state is JobState.CANCELLED else task.end_reason,
    }


class _Row(NamedTuple):
    """What became of a line: how often it was run by this batch, and its last attempt, which is empty where there was none."""

    line: Line
    state: str
    attempts: int
    facts: Mapping[str, Any]


class Progress:
    """The lines of a batch, and the records of their last attempts: those that were done before, and those of its submission."""

    def __init__(self, lines: Sequence[Line], done_before: Mapping[str, Mapping[str, Any]], logs: Path) -> None:
        self.lines, self.logs = lines, logs
        self.to_run = [line for line in lines if line.key not in done_before]
        self.record: JobRecord | None = None
        self._before = done_before
        self._over = len(done_before)
        self._line = StatusLine() if err().is_terminal else None

    @property
    def done(self) -> int:
        ended = 0 if self.record is None else self.record.submission.counts[JobState.ENDED]
        return len(self.lines) - len(self.to_run) + ended

    def _row(self, line: Line) -> _Row:
        if self.record is None or line.key in self._before:
            return _Row(line, _DONE_BEFORE, 0, self._before.get(line.key, {}))
        task = self.record.submission.task(line.number)
        facts = attempt_facts(self.record, task, line.key) if task.attempts or task.why else {}
        return _Row(line, _STATES.get(task.state, "waiting"), task.tries or task.attempts, facts)

    # --- while it runs -------------------------------------------------------------------------------------------------

    def tell_end(self, facts: Mapping[str, Any], *, is_again: bool) -> None:
        """Print what became of an attempt."""
        self._over += not is_again
        where, took, how = _gpus(facts), _took(facts), _how(facts)
        what = f"[{self._over}/{len(self.lines)}] {how}{', again later' if is_again else ''}: line {facts['line']}"
        what += f"{f' on GPU {where}' if where else ''}{f' in {took}' if took else ''}"
        self.close()
        text = f"gpu-pool: {plain(what)}: {_shown(facts['command'])}"
        if self._line is None:
            tell(text)
        else:
            with suppress(OutputClosed):  # a terminal that is gone is no reason to stop the batch
                err().print(Text(text, style="" if how == "ok" else "red", is_line=True))

    def show_running(self) -> None:
        """On a terminal, show how far it is, and what runs."""
        if self._line is None or self.record is None:
            return
        commands = {line.number: line.command for line in self.lines}
        running = [
            f"line {task.index} ({show_duration(time() - (task.started_at or 0.0))}): {_shown(commands[task.index or 0])}"
            for task in self.record.submission.running()
        ]
        more = f" and {len(running) - 1} more" if len(running) > 1 else ""
        self._line.show(f"{self.done}/{len(self.lines)} done{f'; {running[0]}{more}' if running else ''}")

    def close(self) -> None:
        if self._line is not None:
            self._line.close()

    # --- at the end ----------------------------------------------------------------------------------------------------

    def print_summary(self, state: Path | None, exit_code: int, *, is_json: bool) -> None:
        rows = list(map(self._row, self.lines))
        counts = Counter(row.state for row in rows)
        not_run, failed = counts["waiting"] + counts["running"], counts["failed"]
        if is_json:
            facts = {
                "exit_code": exit_code,
                "jobs": list(map(_json, rows)),
                "done": counts["done"],
                "done_before": counts[_DONE_BEFORE],
                "failed": failed,
                "not_run": not_run,
                "logs": str(self.logs),
                "state": None if state is None else str(state),
            }
            print_json("batch", facts)
            return
        table = make_table("LINE", "STATE", "TRIES", "GPU", "TIME", "HOW", "COMMAND", "LOG")
        if len(rows) > _MAX_IN_SUMMARY:
            rows = [row for row in rows if row.state == "failed"][:_MAX_IN_SUMMARY]
        for row in rows:
            table.add_row(
                str(row.line.number),
                Text(row.state, style=_COLOURS.get(row.state, "")),
                str(row.attempts or "-"),
                _gpus(row.facts) or "-",
                _took(row.facts) or "-",
                Text(plain(_how(row.facts)) if row.facts else "-"),
                Text(_shown(row.line.command), is_line=True),
                Text(plain(row.line.log_in(self.logs)) if row.facts else "-"),
            )
        print_table(out(), table)
        rest = f", {not_run} not run" if not_run else ""
        out().print(f"{self.done} of {len(self.lines)} done, {failed} failed{rest}")
        if (not_run or failed) and state is not None:
            out().print("Run the same command again for the jobs that are not done.")


def _json(row: _Row) -> dict[str, Any]:
    return {
        "line": row.line.number,
        "command": row.line.command,
        "state": row.state.replace(" ", "_"),
        "attempts": row.attempts,
        **{name: row.facts.get(name) for name in _KEPT},
        "gpus": list(row.facts.get("gpus") or ()),
    }


def _how(facts: Mapping[str, Any]) -> str:
    return "ok" if is_good(facts) else str(facts.get("why") or f"exit code {facts.get('exit_code')}")


def _took(facts: Mapping[str, Any]) -> str:
    began, ended = (read_time(str(facts.get(name))) for name in ("started_at", "ended_at"))
    return "" if began is None or ended is None else show_duration(max(ended - began, 0.0))


def _gpus(facts: Mapping[str, Any]) -> str:
    return ", ".join(map(str, facts.get("gpus") or ()))


def _shown(command: str) -> str:
    """The command without what a terminal would obey."""
    return plain(command.replace("\t", " "))
