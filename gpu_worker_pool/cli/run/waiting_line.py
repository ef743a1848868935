"""The line about a wait: the reason with the queue position, and who holds the GPUs since when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from math import inf
from time import monotonic, time
from typing import Final, NamedTuple

from gpu_worker_pool.cli.live import Live
from gpu_worker_pool.cli.output import Console, plain
from gpu_worker_pool.cli.pools.report import show_clock
from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.cli.pools.terms import show_start
from gpu_worker_pool.cli.units import show_duration
from gpu_worker_pool.client.events import ClientEvent
from gpu_worker_pool.core.queue.explain import MAX_NAMES
from gpu_worker_pool.wire.leases import LeaseView, ObstacleView, WaitingLeaseView
from gpu_worker_pool.wire.reader import read

# How often the server is asked about the request. The grant itself reaches the client at once, by another call.
_POLL_S: Final = 1.0
# Without a terminal, a line is written when the reason changes, but not more often than this.
_MIN_BETWEEN_LINES_S: Final = 10.0
Tell = Callable[[str | None, str, LeaseView | None], None]


class _QueueLine(NamedTuple):
    """The wait in one queue; `lease` is None where the server does not describe it."""

    endpoint: str | None
    text: str
    lease: LeaseView | None


def waiting_text(reason: str | None, obstacles: Sequence[ObstacleView], waited_s: float, now_s: float) -> str:
    """The wait in one line: how long it has been, and the reason, in which each holder has a time if one is known."""
    leased = [obstacle for obstacle in obstacles if obstacle.code == "leased"]
    names = list(dict.fromkeys(name for obstacle in leased for name in obstacle.holders))[:MAX_NAMES]
    since: dict[str, float] = {}
    for obstacle in leased:
        # Of a GPU with several holders it is known only since when the first of them has it.
        if obstacle.since_at is not None and len(set(obstacle.holders)) == 1:
            name = obstacle.holders[0]
            since[name] = min(since.get(name, obstacle.since_at), obstacle.since_at)
    timed = [f"{name} {show_clock(since[name], now_s)}" if name in since else name for name in names]
    said = (reason or "").replace(f"leased by {', '.join(names)}", f"leased by {', '.join(timed)}", 1)
    return f"waiting {show_duration(waited_s)}. {said}"


class WaitingLine:
    """Shows the wait from the client's first event of waiting until `close`. `note` takes the client's events.

    `tell` is called instead, with the endpoint, the line and the lease, when the line has changed.
    """

    def __init__(self, servers: Servers, console: Console, *, is_quiet: bool = False, tell: Tell | None = None) -> None:
        self._servers = servers
        self._console = console
        self._is_quiet = is_quiet and tell is None
        self._tell = tell
        self._began = monotonic()
        self._queues: dict[str, ClientEvent] = {}
        self._task: asyncio.Task[None] | None = None
        self._last_written: tuple[str, float] | None = None

    @property
    def waited_s(self) -> float:
        return monotonic() - self._began

    @property
    def has_waited(self) -> bool:
        return bool(self._queues)

    def note(self, event: ClientEvent) -> None:
        if event.kind == "waiting" and event.endpoint is not None:
            self._queues[event.endpoint] = event
            if self._task is None and not self._is_quiet:
                self._task = asyncio.get_running_loop().create_task(self._show())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _show(self) -> None:
        if self._tell is not None or not self._console.is_terminal:
            while True:
                self._write(await self._lines())
                await asyncio.sleep(_POLL_S)
        live = Live(self._console)
        try:
            while True:
                live.show([line.text for line in await self._lines()])
                await asyncio.sleep(_POLL_S)
        finally:
            live.close()

    def _write(self, lines: list[_QueueLine]) -> None:
        # Each line begins with the time waited, which always changes, so the lines are compared without it.
        gist = "; ".join(line.text.partition(". ")[2] for line in lines)
        last_gist, last_at = self._last_written or (None, -inf)
        if gist != last_gist and monotonic() - last_at >= _MIN_BETWEEN_LINES_S:
            self._last_written = (gist, monotonic())
            for line in lines:
                if self._tell is None:
                    self._console.print(f"gpu-pool: {line.text}")
                else:
                    self._tell(*line)

    async def _lines(self) -> list[_QueueLine]:
        queues = dict(self._queues)  # another queue may be joined meanwhile
        lines = await asyncio.gather(*map(self._describe, queues.values()))
        if len(lines) == 1 or self._tell is not None:
            return lines
        return [line._replace(text=f"{line.endpoint}: {line.text}") for line in lines]

    async def _describe(self, event: ClientEvent) -> _QueueLine:
        """The wait as the server describes it now; where it does not, as the client's event did."""
        reason: str | None = event.detail
        obstacles: tuple[ObstacleView, ...] = ()
        shown: LeaseView | None = None
        if event.endpoint in self._servers.ids:
            answer = await self._servers.ask(event.endpoint, f"/leases/{event.lease_id}")
            lease = read(WaitingLeaseView, answer.data, clean=plain)
            if answer.is_ok and lease is not None and lease.state == "queued":
                reason, obstacles, shown = lease.reason or reason, lease.obstacles, lease
        text = waiting_text(reason, obstacles, self.waited_s, time())
        start = "" if shown is None else show_start(shown, time())
        return _QueueLine(event.endpoint, f"{text.rstrip('. ')}; {start}" if start else text, shown)
