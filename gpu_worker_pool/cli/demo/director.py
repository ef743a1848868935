"""The course of a demo: starts the processes, lets them compete, kills a worker and the server on the way, takes it all down."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console

from gpu_worker_pool.cli.failure import Failure
from gpu_worker_pool.core.model.visible_devices import InstalledGpu, select_visible
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.wire.transport import CallFailed, Transport

from .check import Line, Outage, Turn, survival, turns_of
from .folder import DemoFolder, demo_folder
from .scene import Scene, WorkerRow
from .stage import DemoServer, DemoWorkers
from .summary import Record, left_over
from .view import LiveView, PlainView, View

SIMULATED: Final = "4"
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
# What the end takes at most.
_ENDING_S: Final = 9.0
_STARTING_S: Final = 12.0
_FINISHING_S: Final = 4.5
_NOTICING_S: Final = 1.0
_FRAME_S: Final = 0.1
_CALL_S: Final = 2.0
# When the worker and the server are killed, as a part of the time; then the next good moment is taken.
_WORKER_DIES: Final = 0.3
_SERVER_DIES: Final = 0.5
_AWAY_S: Final = 0.4


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for. Without `gpus` the machine's are used, as far as CUDA_VISIBLE_DEVICES shows them, or simulated
    ones where none is free.
    """

    workers: int
    gpus: int | None
    seconds: float
    seed: int
    # When it is given up.
    longest_s: float
    has_cheat: bool = False


class Demo:
    """One run. However it ends, none of its processes is left."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self._plan = plan
        width = max(2, len(str(plan.workers)))
        names = [f"w{number:0{width}}" for number in range(1, plan.workers + 1)]
        self._scene = Scene(plan.seconds, {name: WorkerRow(name) for name in names})
        self._view: View = (LiveView if console.is_terminal else PlainView)(console, self._scene)
        self._lines: list[Line] = []
        self._workers = DemoWorkers(names, self._take_in)
        self._news = asyncio.Event()
        self._transport = Transport()
        self._settings: dict[str, str] = {}
        self._outage: Outage | None = None
        self._usable = 1
        # The fewer GPUs there are, the shorter each is held, so that everybody has his turns.
        self._pace = 1.0

    async def run(self) -> Record:
        """From the start to the end; Failure where it cannot be, or does not end in time."""
        began_at = boot_time()
        with demo_folder() as folder, self._view:
            server = DemoServer(folder)
            try:
                async with asyncio.timeout(self._plan.longest_s), self._shown(server):
                    pool = await self._raise_curtain(server, folder)
                    await self._play(server, began_at)
                    waiting_pool = await self._finish(server)
                    self._workers.close()
                    last_pool = await self._when_all_had_gone(server)
                    await server.stop()
            except TimeoutError:
                raise Failure("the demo did not end in time; is this machine very busy?", 1) from None
            finally:
                server.close()
                self._workers.close()
                await self._transport.close()
        return Record(
            lines=self._lines,
            outage=self._outage,
            waiting_pool=waiting_pool,
            last_pool=last_pool,
            source=pool["source"],
            gpus=len(pool["gpus"]),
            workers=self._plan.workers,
            seed=self._plan.seed,
            took_s=boot_time() - began_at,
        )

    # --- before ----------------------------------------------------------------------------------------------------

    async def _raise_curtain(self, server: DemoServer, folder: DemoFolder) -> Mapping[str, Any]:
        """Start everything, side by side; what the server shows then."""
        await self._transport.open()
        self._announce(f"starting a server on {server.url} and {self._plan.workers} worker processes")
        self._workers.start(folder, server.url, self._plan.seed, self._cheat)
        pool = await self._start_server(server)
        plural = "s" if len(pool["gpus"]) > 1 else ""
        kind = f"simulated GPU{plural}" if pool["source"] == "simulated" else f"GPU{plural} of this machine"
        self._scene.title = f"{len(pool['gpus'])} {kind}, {self._plan.workers} worker processes"
        self._scene.show_gpus(pool["gpus"])
        self._scene.is_up = True
        self._usable = max(sum(gpu["state"] == "free" for gpu in pool["gpus"]), 1)
        self._pace = min(1.0, 3 * self._usable / self._plan.workers)
        await self._until(lambda: all(row.state != "starts" for row in self._scene.workers.values()), _STARTING_S)
        if len(self._workers.unfinished()) < self._plan.workers:
            raise Failure(f"the workers of the demo did not start: {self._workers.last_words()}", 1)
        return pool

    async def _start_server(self, server: DemoServer) -> Mapping[str, Any]:
        """With real GPUs where some are free, but never more than the workers can compete for."""
        simulated = {"SIMULATED_GPUS": SIMULATED if self._plan.gpus is None else str(self._plan.gpus)}
        installed = _installed_gpus() if self._plan.gpus is None else []
        visible = os.environ.get(VISIBLE)
        if is_any_visible(visible, installed):
            self._settings = {} if visible is None else {VISIBLE: visible}
        else:
            self._settings = simulated
            if installed:
                self._announce(f"{VISIBLE} shows no GPU of this machine: simulated ones take their place")
        await server.start(self._settings)
        pool = await self._must_ask(server, "/pool")
        if self._settings is simulated:
            return pool
        free, most = [gpu["uuid"] for gpu in pool["gpus"] if gpu["state"] == "free"], max(1, self._plan.workers // 3)
        if free and len(pool["gpus"]) <= most:
            return pool
        await server.stop()
        self._settings = {VISIBLE: ",".join(free[:most])} if free else simulated
        if not free:
            self._announce("all GPUs of this machine are in use, and are left alone: simulated ones take their place")
        await server.start(self._settings)
        return await self._must_ask(server, "/pool")

    # --- the play --------------------------------------------------------------------------------------------------

    async def _play(self, server: DemoServer, began_at: float) -> None:
        now = boot_time()
        self._scene.began_at = now
        # On a slow machine it takes longer to start, and the play is shorter.
        ends_at = min(now + self._plan.seconds, began_at + self._plan.longest_s - _ENDING_S)
        self._workers.tell(f"go {self._pace:.3f}")
        number = len(self._scene.spans)
        self._announce(f"{self._plan.workers} workers ask for {number} GPU{'s' if number > 1 else ''}", "bold")
        await asyncio.sleep((ends_at - now) * _WORKER_DIES)
        await self._kill_worker(ends_at)
        await asyncio.sleep(max(now + (ends_at - now) * _SERVER_DIES - boot_time(), 0.0))
        await self._kill_server(server, ends_at)
        await asyncio.sleep(max(ends_at - boot_time(), 0.0))

    async def _kill_worker(self, ends_at: float) -> None:
        def victims() -> list[WorkerRow]:
            soon = boot_time() + 0.3 * self._pace
            return [row for row in self._scene.held() if row.until > soon and row.name != self._cheat]

        await self._until(lambda: bool(victims() and self._scene.queue), min(3.0, ends_at - boot_time()))
        victim = max(victims(), key=lambda row: row.until, default=None)
        if victim is None:
            return
        worker, at = self._workers[victim.name], boot_time()
        worker.kill()
        self._lines.append({"what": "killed", "worker": victim.name, "at": at})
        self._scene.worker_killed(at, victim.name, worker.pid or -1)

    async def _kill_server(self, server: DemoServer, ends_at: float) -> None:
        """At a moment when most GPUs are held for a while, so that there is something to keep."""

        def is_good() -> bool:
            late, held = boot_time() + 1.2 * self._pace, self._scene.held()
            return len(held) >= self._usable and sum(row.until > late for row in held) >= min(2, self._usable)

        await self._until(is_good, min(0.15 * self._plan.seconds, ends_at - boot_time()))
        await self._until(lambda: bool(self._scene.held()), ends_at - boot_time())
        killed_at, pid = boot_time(), server.pid
        server.kill()
        self._scene.server_killed(killed_at, pid)
        await asyncio.sleep(_AWAY_S)
        await server.start(self._settings)
        back_at = boot_time()
        self._scene.server_back(back_at)
        there = [turn for turn in turns_of(self._lines) if _is_open(turn, killed_at)]
        answers = await asyncio.gather(*(self._ask(server, f"/leases/{turn.lease}") for turn in there))
        found = {turn.lease: answer for turn, answer in zip(there, answers, strict=True) if answer is not None}
        self._outage = Outage(killed_at, back_at, found, boot_time())
        await asyncio.sleep(2 * _FRAME_S)  # who gave back in the meantime has said so by then
        kept = survival(turns_of(self._lines), self._outage)
        is_whole = (kept.kept, kept.places_kept) == (kept.held, kept.waiting)
        self._announce(
            f"the server is back after {back_at - killed_at:.1f} s: {kept.kept} of {kept.held} leases and "
            f"{kept.places_kept} of {kept.waiting} places in line are as before",
            "green" if is_whole else "bold red",
        )

    @property
    def _cheat(self) -> str | None:
        return list(self._scene.workers)[-1] if self._plan.has_cheat else None

    # --- after -----------------------------------------------------------------------------------------------------

    async def _finish(self, server: DemoServer) -> Mapping[str, Any] | None:
        """Nobody asks any more, and whoever is in line is served. What the server shows where that takes too long."""
        self._announce("no new requests; who is in line is still served", "bold")
        self._workers.tell("finish")
        await self._until(lambda: not self._workers.unfinished(), _FINISHING_S)
        return await self._ask(server, "/pool") if self._workers.unfinished() else None

    async def _when_all_had_gone(self, server: DemoServer) -> Mapping[str, Any] | None:
        """What the server shows when it has noticed; who did not come to an end was killed."""
        until = boot_time() + _NOTICING_S
        while (pool := await self._ask(server, "/pool")) and left_over(pool) and boot_time() < until:  # noqa: ASYNC110 - theirs
            await asyncio.sleep(_FRAME_S)
        return pool

    # --- parts -----------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _shown(self, server: DemoServer) -> AsyncIterator[None]:
        """Draw, and look at the queue, as long as this lasts."""

        async def show() -> None:
            while True:
                if self._scene.is_up and (pool := await self._ask(server, "/pool")):
                    self._scene.show_pool(pool)
                self._news.set()
                self._view.refresh()
                await asyncio.sleep(_FRAME_S)

        task = asyncio.create_task(show())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _take_in(self, line: dict[str, Any]) -> None:
        self._lines.append(line)
        self._scene.take_in(line)
        self._news.set()

    def _announce(self, text: str, style: str = "") -> None:
        self._scene.announce(boot_time(), text, style)

    async def _until(self, is_so: Callable[[], bool], limit_s: float) -> None:
        """Wait until this is so, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not is_so():
                    await self._news.wait()
                    self._news.clear()

    async def _ask(self, server: DemoServer, path: str) -> dict[str, Any] | None:
        """What the server answers; None where it does not."""
        try:
            reply = await self._transport.call("GET", f"{server.url}{path}", timeout_s=_CALL_S)
        except CallFailed:
            return None
        return reply.data if reply.status == 200 and isinstance(reply.data, dict) else None

    async def _must_ask(self, server: DemoServer, path: str) -> dict[str, Any]:
        answer = await self._ask(server, path)
        if answer is None:
            raise Failure("the server of the demo has started and does not answer; is this machine very busy?", 1)
        return answer


def _is_open(turn: Turn, at: float) -> bool:
    """Whether it was held or waited for at this time."""
    return bool(turn.lease) and turn.ended_at > at and min(turn.queued_at, turn.began_at) <= at


def is_any_visible(value: str | None, installed: Sequence[InstalledGpu]) -> bool:
    """Whether a value of CUDA_VISIBLE_DEVICES lets us have a GPU of this machine. One that names none of them does not:
    a server would show all, but those are not the ones that were meant.
    """
    visible = select_visible(value, installed)
    return bool(visible.indices) and (value is None or visible.is_filtering)


def _installed_gpus() -> list[InstalledGpu]:
    from gpu_worker_pool.gpus.choose import choose_probe  # noqa: PLC0415 - loads the driver's library
    from gpu_worker_pool.gpus.probe import ProbeUnavailable  # noqa: PLC0415

    try:
        probe = choose_probe("demo", None)
    except ProbeUnavailable:
        return []
    try:
        readings = probe.look(boot_time()).readings
        return [InstalledGpu(reading.gpu.index, reading.gpu.key.uuid) for reading in readings]
    finally:
        probe.close()
