"""Shows a demo: as a live picture on a terminal, as plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import ceil
from operator import itemgetter
from typing import Final, Self

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gpu_worker_pool.host.clock import boot_time

from .scene import News, Scene, Span, WorkerRow

# One for each worker; black text is legible on all of them.
_COLOURS: Final = [
    *("#f9844a", "#43aa8b", "#f9c74f", "#6d9dc5", "#f28482", "#90be6d"),
    *("#b388eb", "#4cc9f0", "#e9c46a", "#84a59d", "#f78fb3", "#a3b18a"),
]
_STATES: Final = {
    "starts": ("·", "dim"),
    "rests": ("·", "dim"),
    "waits": ("◌", "yellow"),
    "holds": ("●", "green"),
    "killed": ("✗", "bold red"),
    "done": ("✓", "dim green"),
    "failed": ("!", "bold red"),
}
# After the last request the waiters are still served; the picture has room for that.
_AFTERMATH_S: Final = 2.5
_MOST_NEWS: Final = 8
_ORDINALS: Final = {1: "1st", 2: "2nd", 3: "3rd"}


class View:
    """Shows a scene within the block: as a picture on a terminal, elsewhere as a line for each event."""

    def __init__(self, console: Console, scene: Scene) -> None:
        self._console, self._scene = console, scene
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop", redirect_stderr=False)
        else:
            scene.on_news = self._print

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
            self.refresh()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self.refresh()
            self._live.stop()

    def refresh(self) -> None:
        if self._live is not None:
            width, height = self._console.size
            self._live.update(picture(self._scene, boot_time(), width, height), refresh=True)

    def _print(self, news: News) -> None:
        self._console.print(Text(f"{news.at:6.2f} s  {news.text}"), soft_wrap=True)


def picture(scene: Scene, now: float, width: int, height: int) -> RenderableType:
    """The scene at this moment, in at most so many rows if the GPUs and workers fit."""
    width = min(width, 140)
    columns = max(1, (width - 4) // _WORKER_WIDTH)
    taken = 3 + len(scene.spans) + 3 + ceil(len(scene.workers) / columns) + 2 + 4 + 2

    def panel(content: RenderableType, title: str, height: int | None = None) -> Panel:
        return Panel(content, title=title, title_align="left", border_style="dim", width=width, height=height)

    return Group(
        _heading(scene, now, width),
        panel(_gpus(scene, now, width - 4), "GPUs and their holders"),
        panel(_workers(scene, now, width - 4), "workers"),
        panel(_queue(scene), "the queue", 4),
        panel(_news(scene, min(max(height - taken - 1, 2), _MOST_NEWS)), "what happened"),
    )


_WORKER_WIDTH: Final = 25


def _heading(scene: Scene, now: float, width: int) -> RenderableType:
    passed_s = 0.0 if scene.began_at is None else min(now - scene.began_at, scene.seconds)
    head = Table.grid(expand=False, padding=(0, 1))
    head.width = width
    head.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    head.add_column(width=20)
    head.add_column(justify="right", width=11, no_wrap=True)
    title = Text.assemble(("GPU Worker Pool ", "bold"), (scene.title or "is starting", "dim"))
    bar = ProgressBar(scene.seconds, passed_s, width=20)
    head.add_row(title, bar, Text(f"{passed_s:.0f} of {scene.seconds:.0f} s"))
    return head


def _gpus(scene: Scene, now: float, width: int) -> RenderableType:
    label_width = max(2, *(len(gpu) for gpu in scene.spans), 0) + 6
    cells = max(width - label_width, 10)
    lines = [
        Text(f"GPU {gpu}".ljust(label_width)).append(_strip(scene, spans, now, cells))
        for gpu, spans in sorted(scene.spans.items(), key=lambda item: (len(item[0]), item[0]))
    ]
    server = Text("server".ljust(label_width), "bold red" if scene.away and not scene.is_up else "dim")
    return Group(*lines, server.append(_server_strip(scene, now, cells)))


def _strip(scene: Scene, spans: Sequence[Span], now: float, cells: int) -> Text:
    """The holders of a GPU from left to right, each by its colour and name."""
    if scene.began_at is None:
        return Text("")
    cell_s = (scene.seconds + _AFTERMATH_S) / cells
    strip = [(" ", "")] * cells
    for span in spans:
        first = int((span.began_at - scene.began_at) / cell_s)
        last = min(int((min(span.ended_at, now) - scene.began_at) / cell_s), cells)
        style = f"black on {_colour(scene, span.worker)}"
        label = span.worker if last - first > len(span.worker) else span.worker.lstrip("w")
        for place, letter in enumerate(label.ljust(last - first, "─")[: max(last - first, 0)], start=first):
            if 0 <= place < cells:
                strip[place] = (letter, style)
        if span.was_killed and 0 <= last - 1 < cells:
            strip[max(last - 1, first, 0)] = ("✗", "bold white on red")
    parts = groupby(strip, key=itemgetter(1))
    return Text.assemble(*(("".join(letter for letter, _ in part), style) for style, part in parts))


def _server_strip(scene: Scene, now: float, cells: int) -> Text:
    text = Text()
    if scene.began_at is None:
        return text
    cell_s = (scene.seconds + _AFTERMATH_S) / cells
    for cell in range(min(int((now - scene.began_at) / cell_s) + 1, cells)):
        at = scene.began_at + cell * cell_s
        is_away = any(span.began_at <= at + cell_s and at < min(span.ended_at, now) for span in scene.away)
        text.append("✗" if is_away else "━", "bold red" if is_away else "green")
    return text


def _workers(scene: Scene, now: float, width: int) -> RenderableType:
    cells = [_worker(scene, row, now) for row in scene.workers.values()]
    columns = max(1, width // _WORKER_WIDTH)
    return Columns(cells, width=min(width // columns, 32) - 1, padding=(0, 1), column_first=True)


def _worker(scene: Scene, row: WorkerRow, now: float) -> Text:
    sign, style = _STATES[row.state]
    text = Text.assemble((f"{sign} ", style), (row.name, f"bold {_colour(scene, row.name)}"), " ", no_wrap=True)
    since_s = max(now - row.since, 0.0)
    match row.state:
        case "holds":
            text.append(f"GPU {row.gpu} ", "green").append(f"{since_s:.1f} s", "dim")
        case "waits":
            place = scene.queue.index(row.name) + 1 if row.name in scene.queue else 0
            text.append(f"waits, {_ORDINALS.get(place, f'{place}th')} " if place else "waits ", "yellow")
            text.append(f"{since_s:.1f} s", "dim")
        case "killed":
            text.append("killed with -9", "red")
        case "done":
            text.append(f"done, {row.turns} turns", "dim")
        case _:
            text.append(row.state, style)
    return text


def _queue(scene: Scene) -> RenderableType:
    if scene.away and not scene.is_up:
        return Text(f"The {scene.away[-1].worker} is away. Holders go on; waiters keep their positions.", "red")
    if not scene.queue:
        return Text("no worker waits", "dim")
    line = Text(no_wrap=True, overflow="ellipsis")
    for place, name in enumerate(scene.queue):
        line.append(" ← " if place else "", "dim").append(name, f"bold {_colour(scene, name)}")
    return Group(line, Text(f"{scene.queue[0]}: {scene.why}", "dim", no_wrap=True, overflow="ellipsis"))


def _news(scene: Scene, rows: int) -> RenderableType:
    lines = [
        Text.assemble((f"{news.at:5.1f} s  ", "dim"), (news.text, news.style), no_wrap=True, overflow="ellipsis")
        for news in [news for news in scene.news if news.is_big][-rows:]
    ]
    return Group(*lines, *[Text("")] * (rows - len(lines)))


def _colour(scene: Scene, worker: str) -> str:
    place = list(scene.workers).index(worker) if worker in scene.workers else 0
    return _COLOURS[place % len(_COLOURS)]
