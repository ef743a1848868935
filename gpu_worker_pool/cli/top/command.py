"""`gpu-pool top`: the pool, live, on the whole screen."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Coroutine
from contextlib import ExitStack, suppress
from dataclasses import replace
from math import inf
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.live import Live

from gpu_worker_pool.cli.failure import SIGNAL_BASE
from gpu_worker_pool.cli.options import Endpoints, FleetScope, Json
from gpu_worker_pool.cli.output import asked_width, out, print_json
from gpu_worker_pool.cli.pools.servers import GRACE_S, ServerAnswer, Servers, nobody_answered
from gpu_worker_pool.cli.tasks import cancel_and_wait
from gpu_worker_pool.cli.units import parse_duration_s
from gpu_worker_pool.client.http.grace import gather_with_grace

from . import keys
from .view import NOT_SCROLLED, Picture, Scroll, draw, draw_all
from .watch import Watch, frame_of

SHORTEST_INTERVAL_S: Final = 0.1
# The clock and the ages are drawn this often, even where the servers are asked less often.
_CLOCK_S: Final = 1.0
# News of several servers arrive together, and are drawn together.
_GATHER_S: Final = 0.05
_FAR: Final = 1_000_000


def _interval_s(text: str) -> float:
    seconds = parse_duration_s(text)
    if seconds < SHORTEST_INTERVAL_S:
        raise typer.BadParameter(f"{text!r} is too short; {SHORTEST_INTERVAL_S:g}s is the shortest")
    return seconds


def top(
    endpoint: Endpoints = None,
    json: Json = False,
    fleet: FleetScope = False,
    interval: Annotated[
        float,
        typer.Option(
            "--interval",
            "-i",
            parser=_interval_s,
            metavar="1s",
            show_default=False,
            help="How often the servers are asked; once a second if nothing is said.",
        ),
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print it once and end, as where there is no terminal.")] = False,
    count: Annotated[
        int | None, typer.Option("--count", "-n", metavar="NUMBER", min=1, help="End after so many intervals.")
    ] = None,
) -> int:
    """Watch GPUs, leases and the queue, live. q quits, p pauses, arrow keys scroll.

    Without a terminal it is printed once. With --json, one object on a line each interval, until Ctrl-C or --count.
    Servers that are down are shown so, and again when they are back.
    """
    console = out()
    # Not by rich's own test: colours can be forced into a pipe, a screen cannot.
    is_live = not (json or once or console.is_dumb_terminal) and sys.stdout.isatty()
    if once or (count is None and not json and not is_live):
        count = 1

    async def show(servers: Servers) -> int:
        news = asyncio.Event()
        watches = [Watch(servers, id_, interval, news.set, is_complete=not is_live) for id_ in servers.ids]
        if is_live:
            return await _until_first(_Screen(console, watches, interval, news).run(count), watches)
        return await _until_first(_print(console, watches, interval, count, is_json=json), watches)

    return Servers(endpoint, is_fleet=fleet).run(show)


async def _until_first(showing: Coroutine[Any, Any, int], watches: list[Watch]) -> int:
    """The exit code of the showing, while the watches poll. Not a task group: its errors must arrive as they are."""
    tasks = [asyncio.create_task(showing), *(asyncio.create_task(poll) for watch in watches for poll in watch.polls())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        await cancel_and_wait(*tasks)


async def _print(console: Console, watches: list[Watch], interval_s: float, count: int | None, *, is_json: bool) -> int:
    """Print it `count` times, for ever where that is None; begins when every server has answered or failed, or is late."""
    await _wait_until_known(watches)
    frame = frame_of(watches, interval_s)
    for shown in itertools.count(1):
        if is_json:
            print_json("top", frame.as_json())
        else:
            width = None if console.is_terminal else asked_width()
            is_whole = not console.is_terminal and width is None
            console.print(draw_all(frame, width or console.width, is_whole=is_whole))
        if shown == count:
            break
        await asyncio.sleep(interval_s)
        frame = frame_of(watches, interval_s)
    if not any(server.is_up for server in frame.servers):
        down = [ServerAnswer(item.endpoint, item.url, error=item.error or "no answer") for item in frame.servers]
        raise nobody_answered(down)
    return 0


async def _wait_until_known(watches: list[Watch]) -> None:
    async def has_answered(watch: Watch) -> bool:
        await watch.is_known.wait()
        return watch.has_answered

    asked = [asyncio.create_task(has_answered(watch)) for watch in watches]
    try:
        await gather_with_grace(asked, bool, GRACE_S)
    finally:
        await cancel_and_wait(*asked)


class _Screen:
    """The whole screen, and the keys. However it ends, the terminal is left as it was."""

    def __init__(self, console: Console, watches: list[Watch], interval_s: float, news: asyncio.Event) -> None:
        self._console = console
        self._watches = watches
        self._interval_s = interval_s
        self._news = news
        self._frame = frame_of(watches, interval_s)
        self._picture = Picture([], NOT_SCROLLED)
        self._scroll: Scroll = NOT_SCROLLED
        self._is_paused = False
        self._exit_code: int | None = None
        self._live = Live(
            console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._keyboard = keys.Keyboard(sys.stdin.fileno()) if sys.stdin.isatty() else None

    async def run(self, count: int | None) -> int:
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            self._enter()
            stack.callback(self._leave)
            for number in (signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, self._end, SIGNAL_BASE + number)
                stack.callback(loop.remove_signal_handler, number)
            for number, handle in ((signal.SIGWINCH, self._news.set), (signal.SIGTSTP, self._suspend)):
                loop.add_signal_handler(number, handle)
                stack.callback(loop.remove_signal_handler, number)
            if self._keyboard is not None:
                loop.add_reader(self._keyboard.descriptor, self._on_keys)
                stack.callback(loop.remove_reader, self._keyboard.descriptor)
            ends_at = inf if count is None else loop.time() + count * self._interval_s
            while self._exit_code is None and loop.time() < ends_at:
                self._draw()
                await self._wait()
        return self._exit_code or 0

    async def _wait(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(min(self._interval_s, _CLOCK_S)):
                await self._news.wait()
                await asyncio.sleep(_GATHER_S)
        self._news.clear()

    def _draw(self) -> None:
        if not self._is_paused:
            self._frame = frame_of(self._watches, self._interval_s)
        width, height = self._console.size
        self._picture = draw(replace(self._frame, is_paused=self._is_paused), width, height, self._scroll)
        self._scroll = self._picture.scroll
        self._live.update(self._picture, refresh=True)

    def _on_keys(self) -> None:
        assert self._keyboard is not None  # noqa: S101 - it is what was read from
        pressed = self._keyboard.read()
        if pressed is None:  # the terminal is gone
            self._end(SIGNAL_BASE + signal.SIGHUP)
            return
        page = self._picture.page_rows
        moves = {keys.UP: -1, "k": -1, keys.DOWN: 1, "j": 1, keys.PAGE_UP: -page, keys.PAGE_DOWN: page}
        moves |= {keys.HOME: -_FAR, keys.END: _FAR}
        for key in pressed:
            if key in ("q", "Q"):
                self._end(0)
            elif key == "p":
                self._is_paused = not self._is_paused
            elif key == keys.TAB:
                self._scroll = self._scroll.next_section()
            elif key in moves:
                self._scroll = self._scroll.moved(moves[key])
        self._news.set()

    def _end(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._news.set()

    def _suspend(self) -> None:
        """Ctrl-Z: give the terminal back as it was, until we continue."""
        self._leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._enter()
        self._news.set()

    def _enter(self) -> None:
        if self._keyboard is not None:
            self._keyboard.start()
        self._live.start()

    def _leave(self) -> None:
        self._live.stop()
        if self._keyboard is not None:
            self._keyboard.stop()
