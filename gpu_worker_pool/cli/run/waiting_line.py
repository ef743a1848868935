"""The line about a wait: how long it has been, the queue position, when it will end, and who holds the GPUs since when."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Sequence
from http import HTTPStatus
from math import inf
from time import monotonic, time
from typing import Final, NamedTuple

from gpu_worker_pool.cli.live import Live
from gpu_worker_pool.cli.output import Console, cut_to, plain
from gpu_worker_pool.cli.pools.report import short_start, show_clock, show_gpus
from gpu_worker_pool.cli.pools.servers import FLEET, Servers
from gpu_worker_pool.cli.units import show_duration, show_memory
from gpu_worker_pool.client.events import ClientEvent
from gpu_worker_pool.core.model.request import matches_model
from gpu_worker_pool.wire.leases import LeaseView, ObstacleView, WaitingLeaseView
from gpu_worker_pool.wire.pool import PoolView
from gpu_worker_pool.wire.reader import read

# How often the server is asked about the request. The grant itself reaches the client at once, by another call.
_POLL_S: Final = 1.0
# Without a terminal, a line is written when the reason changes, but not more often than this.
_MIN_BETWEEN_LINES_S: Final = 10.0
MOST_COLUMNS: Final = 100
# Verdicts on GPUs for which no request of this kind waits.
_OF_NO_USE: Final = frozenset({"other_node", "wrong_model", "not_among", "too_small"})
_QUEUE_LENGTH: Final = re.compile(r"Position \d+ of (\d+)\b")
_ENDINGS: Final = {1: "st", 2: "nd", 3: "rd"}
Tell = Callable[[str | None, str, LeaseView | None], None]


class _QueueLine(NamedTuple):
    """The wait in one queue; `lease` is None where the server does not describe it."""

    endpoint: str | None
    text: str
    lease: LeaseView | None


def waiting_text(lease: LeaseView, now: float, room: int = MOST_COLUMNS) -> str:
    """The wait in one line: `for 1 A100 (2nd of 5), starts about 14:20. alice 2 since 11:09, carol 1 since 14:02`."""
    wishes = lease.wishes
    wanted = wishes.model or ("GPU" if wishes.gpus == 1 else "GPUs")
    shared = "" if wishes.memory_mb is None else f" with {show_memory(wishes.memory_mb)}"
    of_all = _QUEUE_LENGTH.match(lease.reason or "")
    place = (
        "" if lease.position is None else f" ({_ordinal(lease.position)} {f'of {of_all[1]}' if of_all else 'in line'})"
    )
    among = wishes.among or ()
    is_named = len(among) == wishes.gpus and all(name.isdigit() for name in among)
    begin = f"for {show_gpus(among) if is_named else f'{wishes.gpus} {wanted}'}{shared}{place}"
    if start := short_start(lease, now):
        begin += f", starts {'about' if start.startswith('~') else 'by'} {start.lstrip('~')}"
    obstacles = lease.obstacles if isinstance(lease, WaitingLeaseView) else ()
    others = [obstacle for obstacle in obstacles if obstacle.code not in _OF_NO_USE]
    if others and all(obstacle.code == "leased" for obstacle in others):
        return f"{begin}. {_holders(others, now, room - len(begin) - 2)}"
    why = (lease.reason or "").partition(": ")[2] or lease.reason
    return cut_to(f"{begin}. {why}" if why else begin, room)


def _ordinal(number: int) -> str:
    return f"{number}{'th' if number % 100 in {11, 12, 13} else _ENDINGS.get(number % 10, 'th')}"


def _holders(leased: Sequence[ObstacleView], now: float, room: int) -> str:
    """`alice 2 since 11:09, carol 1 since 14:02 and 3 more`: the people who hold GPUs, who has most first."""
    held: dict[str, tuple[int, float | None]] = {}
    for obstacle in leased:
        people = list(dict.fromkeys(name.partition(" (")[0] for name in obstacle.holders))
        for person in people:
            number, since = held.get(person, (0, None))
            # Of a GPU with several holders it is known only since when the first of them has it.
            known = [at for at in (since, obstacle.since_at if len(people) == 1 else None) if at is not None]
            held[person] = number + 1, min(known, default=None)
    said = [
        f"{person} {number}" + ("" if since is None else f" {show_clock(since, now)}")
        for person, (number, since) in sorted(held.items(), key=lambda item: -item[1][0])
    ]
    shown = len(said)
    while shown > 1 and len(_joined(said, shown)) > room:
        shown -= 1
    return _joined(said, shown)


def _joined(said: Sequence[str], shown: int) -> str:
    return ", ".join(said[:shown]) + (f" and {len(said) - shown} more" if shown < len(said) else "")


class WaitingLine:
    """Shows the wait from the client's first event of waiting until `close`. `note` takes the client's events.

    `tell` is called instead, with the endpoint, the line and the lease, when the line has changed. Where it `looks_elsewhere`, the
    line says which other boxes of a fleet have GPUs that would do.
    """

    def __init__(
        self,
        servers: Servers,
        console: Console,
        *,
        is_quiet: bool = False,
        tell: Tell | None = None,
        looks_elsewhere: bool = False,
    ) -> None:
        self._servers = servers
        self._console = console
        self._is_quiet = is_quiet and tell is None
        self._tell = tell
        self._looks_elsewhere = looks_elsewhere
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
                live.show([self._line(line) for line in await self._lines()])
                await asyncio.sleep(_POLL_S)
        finally:
            live.close()

    def _write(self, lines: list[_QueueLine]) -> None:
        # The time waited always changes, so the lines are compared without it.
        gist = "; ".join(line.text for line in lines)
        last_gist, last_at = self._last_written or (None, -inf)
        if gist != last_gist and monotonic() - last_at >= _MIN_BETWEEN_LINES_S:
            self._last_written = (gist, monotonic())
            for line in lines:
                if self._tell is None:
                    self._console.print(f"gpu-pool: {self._line(line)}")
                else:
                    self._tell(line.endpoint, self._line(line), line.lease)

    def _line(self, line: _QueueLine) -> str:
        where = f"{line.endpoint}: " if len(self._queues) > 1 and self._tell is None else ""
        return f"{where}waiting {show_duration(self.waited_s)} {line.text}"

    async def _lines(self) -> list[_QueueLine]:
        queues = dict(self._queues)  # another queue may be joined meanwhile
        return await asyncio.gather(*map(self._describe, queues.values()))

    async def _describe(self, event: ClientEvent) -> _QueueLine:
        """The wait as the server describes it now; where it does not, as the client's event did."""
        columns = self._console.width - 1 if self._console.is_terminal else MOST_COLUMNS
        room = min(columns, MOST_COLUMNS) - len("waiting 59m 59s ")
        if event.endpoint in self._servers.ids:
            answer = await self._servers.ask(event.endpoint, f"/leases/{event.lease_id}")
            lease = read(WaitingLeaseView, answer.data, clean=plain)
            if answer.is_ok and lease is not None and lease.state == "queued":
                free = f". {found}" if (found := await self._free_elsewhere(event.endpoint, lease)) else ""
                return _QueueLine(event.endpoint, waiting_text(lease, time(), room - len(free)) + free, lease)
        return _QueueLine(event.endpoint, event.detail or "", None)

    async def _free_elsewhere(self, endpoint: str, lease: LeaseView) -> str:
        """`8 GPUs are free on gpu-2, gpu-3; add --anywhere`; empty where there are none, or no fleet."""
        if not self._looks_elsewhere:
            return ""
        answer = await self._servers.ask(endpoint, f"{FLEET}/pool?queue=0&leases=0")
        pool = read(PoolView, answer.data, clean=plain) if answer.is_ok else None
        self._looks_elsewhere = answer.status != HTTPStatus.NOT_FOUND
        wishes = lease.wishes
        free = Counter(
            gpu.node
            for gpu in (pool.gpus if pool else ())
            if gpu.state == "free" and matches_model(wishes.model, gpu.name or "")
        )
        nodes = sorted(node for node, number in free.items() if node and number >= wishes.gpus)
        if not nodes:
            return ""
        total = sum(free[node] for node in nodes)
        return f"{total} GPU{' is' if total == 1 else 's are'} free on {', '.join(nodes)}; add --anywhere"
