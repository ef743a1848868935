"""What is to be seen of a demo at a moment: made from what the workers say, what the server shows, and what is announced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

State = Literal["starts", "rests", "waits", "holds", "killed", "done", "failed"]


@dataclass(slots=True)
class WorkerRow:
    """A worker, what it does, and since when."""

    name: str
    state: State = "starts"
    since: float = 0.0
    gpu: int | None = None
    turns: int = 0
    until: float = 0.0


@dataclass(slots=True)
class Span:
    """A time in which a worker had a GPU."""

    worker: str
    began_at: float
    ended_at: float = inf
    was_killed: bool = False


@dataclass(frozen=True, slots=True)
class News:
    """Something that happened. What is big is what a person is to notice."""

    at: float
    text: str
    style: str = ""
    is_big: bool = False


@dataclass(slots=True)
class Scene:
    """All that is shown. `began_at` is when the workers were let go; times are shown from there."""

    seconds: float
    workers: dict[str, WorkerRow]
    on_news: Callable[[News], None] = lambda _: None
    began_at: float | None = None
    title: str = ""
    spans: dict[int, list[Span]] = field(default_factory=dict)
    queue: Sequence[str] = ()
    why: str = ""
    is_up: bool = False
    away: list[Span] = field(default_factory=list)
    news: list[News] = field(default_factory=list)
    # GPUs of workers that were killed, and when, until somebody else has them.
    _orphans: dict[int, float] = field(default_factory=dict)

    def announce(self, at: float, text: str, style: str = "", *, is_big: bool = True) -> None:
        """Say what happened."""
        since = at - self.began_at if self.began_at is not None else 0.0
        news = News(since, text, style, is_big)
        self.news.append(news)
        self.on_news(news)

    def show_gpus(self, gpus: Sequence[Mapping[str, Any]]) -> None:
        """The GPUs that there are."""
        self.spans = {gpu["gpu_id"]: [] for gpu in gpus}

    def show_pool(self, pool: Mapping[str, Any]) -> None:
        """The queue, as the server shows it."""
        self.queue = [lease["labels"].get("demo", "?") for lease in pool["queue"]]
        self.why = pool["queue"][0]["reason"] if pool["queue"] else ""

    def server_killed(self, at: float, pid: int) -> None:
        """It is away."""
        self.is_up = False
        self.away.append(Span("server", at))
        self.announce(at, f"kill -9 of the server (pid {pid}), with everybody's leases", "bold red")

    def server_back(self, at: float) -> None:
        """It is there again."""
        self.is_up = True
        for span in self.away:
            span.ended_at = min(span.ended_at, at)

    def worker_killed(self, at: float, name: str, pid: int) -> None:
        """One of them is no more."""
        row = self.workers[name]
        self.announce(at, f"kill -9 of {name} (pid {pid}), which holds GPU {row.gpu}", "bold red")
        if row.gpu is not None:
            self._orphans[row.gpu] = at
            self._close_span(row, at, was_killed=True)
        row.state, row.since, row.gpu = "killed", at, None

    def take_in(self, line: Mapping[str, Any]) -> None:
        """What a worker says."""
        row, at = self.workers[line["worker"]], float(line["at"])
        if row.state == "killed":
            return  # said before it died, read after
        match line["what"]:
            case "ready":
                row.state, row.since = "rests", at
            case "asks":
                row.state, row.since = "waits", at
            case "begins":
                self._begin(row, at, line)
            case "ends":
                self._close_span(row, at)
                self.announce(at, f"{row.name} gives GPU {row.gpu} back", "dim", is_big=False)
                row.state, row.since, row.gpu = "rests", at, None
            case "done":
                row.state, row.since = "done", at
            case "busy":
                self.announce(at, f"{row.name} finds somebody else on GPU {line['gpu']}!", "bold red")
            case "lost" | "failed":
                row.state, row.since = "failed", at
                self.announce(at, f"{row.name}: {line['reason']}", "bold red")

    def held(self) -> list[WorkerRow]:
        """The workers that hold a GPU."""
        return [row for row in self.workers.values() if row.state == "holds"]

    def waiting(self) -> list[WorkerRow]:
        """The workers that wait for one."""
        return [row for row in self.workers.values() if row.state == "waits"]

    def _begin(self, row: WorkerRow, at: float, line: Mapping[str, Any]) -> None:
        gpu, waited_s = int(line["gpu"]), at - row.since
        text = f"{row.name} holds GPU {gpu} (fence {line['fence']}) after {waited_s:.2f} s"
        self.announce(at, text, is_big=False)
        died_at = self._orphans.pop(gpu, None)
        if died_at is not None:
            handover_ms = 1000 * (at - died_at)
            self.announce(at, f"GPU {gpu} is {row.name}'s, {handover_ms:.0f} ms after the death", "green")
        row.state, row.since, row.gpu = "holds", at, gpu
        row.until = at + float(line["for_s"])
        row.turns += 1
        self.spans.setdefault(gpu, []).append(Span(row.name, at))

    def _close_span(self, row: WorkerRow, at: float, *, was_killed: bool = False) -> None:
        for span in reversed(self.spans.get(row.gpu if row.gpu is not None else -1, [])):
            if span.worker == row.name:
                span.ended_at, span.was_killed = at, was_killed
                return
