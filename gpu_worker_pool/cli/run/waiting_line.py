"""The line that says what one is waiting for: position, reason, who has it and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import monotonic, time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from gpu_worker_pool.cli.pools.servers import Servers
from gpu_worker_pool.cli.units import show_duration
from gpu_worker_pool.client.events import ClientEvent

# How often it is asked how the waiting stands; it is not what ends the waiting.
LOOK_S = 1.0
# Where there is no terminal, a line is written when the position changes, and not more often than this.
TELL_S = 10.0
_MOST_NAMED = 3


def holders(lease: Mapping[str, Any], now_s: float) -> str:
    """Who has what is wished for, and for how long: `ada for 12m, bob for 3h`; the latest to begin last."""
    since: dict[str, float] = {}
    for obstacle in lease.get("obstacles") or ():
        if isinstance(obstacle, dict) and obstacle.get("code") == "leased" and _is_number(obstacle.get("since_at")):
            for name in obstacle.get("holders") or ():
                since[str(name)] = min(since.get(str(name), now_s), obstacle["since_at"])
    longest = sorted(since.items(), key=lambda item: item[1])
    named = [f"{name} for {show_duration(now_s - at)}" for name, at in longest[:_MOST_NAMED]]
    return ", ".join(named + ([f"{len(longest) - _MOST_NAMED} more"] if len(longest) > _MOST_NAMED else []))


def waiting_text(lease: Mapping[str, Any], waited_s: float, now_s: float) -> str:
    """All of it in one line."""
    held = holders(lease, now_s)
    return f"waiting {show_duration(waited_s)}. {lease.get('reason')}" + (f". Held by {held}" if held else "")


class WaitingLine:
    """Shown from the first time that one has to wait until `close`. It is fed with the client's events."""

    def __init__(self, servers: Servers, console: Console, *, is_quiet: bool = False) -> None:
        self._servers = servers
        self._console = console
        self._is_quiet = is_quiet
        self._began = monotonic()
        self._places: dict[str, ClientEvent] = {}
        self._task: asyncio.Task[None] | None = None
        self._told: tuple[str, float] | None = None

    @property
    def waited_s(self) -> float:
        """How long it has been."""
        return monotonic() - self._began

    @property
    def has_waited(self) -> bool:
        """Whether there was anything to wait for."""
        return bool(self._places)

    def note(self, event: ClientEvent) -> None:
        """Something happened in the client."""
        if event.kind == "waiting" and event.endpoint is not None:
            self._places[event.endpoint] = event
            if self._task is None and not self._is_quiet:
                self._task = asyncio.get_running_loop().create_task(self._show())

    async def close(self) -> None:
        """It is over, one way or the other."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _show(self) -> None:
        if not self._console.is_terminal:
            while True:
                self._tell(await self._lines())
                await asyncio.sleep(LOOK_S)
        spinner = Spinner("dots")
        with Live(spinner, console=self._console, transient=True, refresh_per_second=8):
            while True:
                text = Text("\n").join(Text(line, no_wrap=True, overflow="ellipsis") for line in await self._lines())
                spinner.update(text=text)
                await asyncio.sleep(LOOK_S)

    def _tell(self, lines: list[str]) -> None:
        # The time that has passed is in the line, so it is compared without it.
        gist = "; ".join(line.partition(". ")[2] for line in lines)
        if self._told is None or (gist != self._told[0] and monotonic() - self._told[1] >= TELL_S):
            self._told = (gist, monotonic())
            for line in lines:
                self._console.print(f"gpu-pool: {line}", markup=False)

    async def _lines(self) -> list[str]:
        """A line for each queue."""
        asked = await asyncio.gather(*(self._ask(event) for event in self._places.values()))
        is_one = len(asked) == 1
        lines = []
        for event, lease in zip(self._places.values(), asked, strict=True):
            text = waiting_text(lease, self.waited_s, time())
            lines.append(text if is_one else f"{event.endpoint}: {text}")
        return lines

    async def _ask(self, event: ClientEvent) -> Mapping[str, Any]:
        """The lease as its server tells it; what the client said of it where that does not."""
        known = {"reason": event.detail}
        if event.endpoint not in self._servers.ids:
            return known
        answer = await self._servers.ask(event.endpoint, f"/leases/{event.lease_id}")
        if not answer.is_ok or not isinstance(answer.data, dict) or answer.data.get("state") != "queued":
            return known
        return answer.data


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
