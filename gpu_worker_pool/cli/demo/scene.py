"""The state that a demo shows: from the workers' lines, the server's answers and announcements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

WorkerState = Literal["starts", "rests", "waits", "holds", "killed", "done", "failed"]


@dataclass(slots=True)
class WorkerRow:
    name: str
    pid: int = -1
    state: WorkerState = "starts"
    since: float = 0.0
    gpu: str = ""
    turns: int = 0
    until: float = 0.0


@dataclass(slots=True)
class Span:
    """A time in which a worker had a GPU, or the server was down."""

    worker: str
    began_at: float
    ended_at: float = inf
    was_killed: bool = False


@dataclass(frozen=True, slots=True)
class News:
    """An event of the demo. A big one appears in the picture too."""

    at: float
    text: str
    style: str = ""
    is_big: bool = False


@dataclass(slots=True)
class Scene:
    """All that is shown. `began_at` is the time at which the workers start; times count from it."""

    seconds: float
    workers: dict[str, WorkerRow]
    on_news: Callable[[News], None] = lambda _: None
    began_at: float | None = None
    title: str = ""
    spans: dict[str, list[Span]] = field(default_factory=dict)
    queue: Sequence[str] = ()
    why: str = ""
    is_up: bool = False
    away: list[Span] = field(default_factory=list)
    news: list[News] = field(default_factory=list)
    # The GPUs of killed workers and the times of their deaths, until another worker has the GPU.
    _orphans: dict[str, float] = field(default_factory=dict)

    def announce(self, at: float, text: str, style: str = "", *, is_big: bool = True) -> None:
        news = News(0.0 if self.began_at is None else at - self.began_at, text, style, is_big)
        self.news.append(news)
        self.on_news(news)

    def in_state(self, *states: WorkerState) -> list[WorkerRow]:
        return [row for row in self.workers.values() if row.state in states]

    def server_killed(self, at: float, what: str, text: str) -> None:
        self.is_up = False
        self.away.append(Span(what, at))
        self.announce(at, f"kill -9 of {text}", "bold red")

    def worker_killed(self, at: float, row: WorkerRow) -> None:
        self.announce(at, f"kill -9 of {row.name} (pid {row.pid}), which holds GPU {row.gpu}", "bold red")
        self._orphans[row.gpu] = at
        self._leave(row, at, was_killed=True)
        row.state = "killed"

    def add_line(self, line: Mapping[str, Any]) -> None:
        row, at = self.workers[line["who"]], float(line["at"])
        if row.state == "killed":
            return  # written before the death, read after it
        match line["what"]:
            case "ready":
                row.state, row.since, row.pid = "rests", at, line["pid"]
            case "asks":
                row.state, row.since = "waits", at
            case "took":
                self._take(row, at, line)
            case "left":
                self.announce(at, f"{row.name} releases GPU {row.gpu}", "dim", is_big=False)
                self._leave(row, line["left_at"])
            case "exits":
                row.state, row.since = "done", at
            case "witness_busy":
                self.announce(at, f"{row.name} finds another worker on GPU {row.gpu}!", "bold red")
            case "lost" | "could_not_go_on":
                row.state, row.since = "failed", at
                self.announce(at, f"{row.name}: {line['reason']}", "bold red")

    def _take(self, row: WorkerRow, at: float, line: Mapping[str, Any]) -> None:
        gpu = str(line["gpu_ids"][0])
        text = f"{row.name} holds GPU {gpu} (fence {line['fence']}) after {at - row.since:.2f} s"
        self.announce(at, text, is_big=False)
        died_at = self._orphans.pop(gpu, None)
        if died_at is not None:
            self.announce(at, f"GPU {gpu} is {row.name}'s, {1000 * (at - died_at):.0f} ms after the death", "green")
        row.state, row.since, row.gpu, row.until = "holds", at, gpu, at + float(line["for_s"])
        row.turns += 1
        self.spans.setdefault(gpu, []).append(Span(row.name, at))

    def _leave(self, row: WorkerRow, at: float, *, was_killed: bool = False) -> None:
        row.state, row.since = "rests", at
        for span in self.spans[row.gpu]:
            if span.worker == row.name and span.ended_at == inf:
                span.ended_at, span.was_killed = at, was_killed
