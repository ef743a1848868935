"""The course of a demo: starts the processes, lets them compete, kills a worker and the server, and ends everything."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console

from gpu_worker_pool.cli.failure import Failure
from gpu_worker_pool.cli.units import count
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.host.visible_devices import InstalledGpu, select_visible
from gpu_worker_pool.run_history import Line, RunHistory
from gpu_worker_pool.testing import Answer, ServerDidNotStartError, ServerProcess

from .folder import DemoFolder
from .scene import Scene, WorkerRow
from .summary import Record, open_at, survival
from .view import View
from .worker import WorkerSettings
from .workers import DemoWorkers, last_line

SIMULATED: Final = "4"
SERVER_SETTINGS: Final = {"REFRESH_INTERVAL": "0.5", "ACCESS_LOG": "false"}
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_ENDING_S: Final = 9.0  # at most
_FINISHING_S: Final = 4.5
_NOTICING_S: Final = 1.0
STOPPING_S: Final = 3.0
FRAME_S: Final = 0.1
CALL_S: Final = 2.0
# When to kill the worker and the server, as a part of the time; the next good moment is used.
_WORKER_DIES: Final = 0.3
_SERVER_DIES: Final = 0.5
_AWAY_S: Final = 0.4


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The options of a demo. It is given up after `longest_s`."""

    workers: int
    gpus: int | None
    seconds: float
    seed: int
    longest_s: float
    has_cheat: bool = False


class Demo:
    """One run. However it ends, no process of it is left."""

    _scope = ""
    _starting_s = 12.0
    _patience_s = 3.0
    _back: Mapping[str, str] = {"server": "the server is back"}

    def __init__(self, plan: DemoPlan, console: Console, folder: DemoFolder) -> None:
        self._plan = plan
        width = max(2, len(str(plan.workers)))
        self._names = [f"w{number:0{width}}" for number in range(1, plan.workers + 1)]
        self._cheat = self._names[-1] if plan.has_cheat else None
        self._scene = Scene(plan.seconds, {name: WorkerRow(name) for name in self._names})
        self._view = View(console, self._scene)
        self._lines: list[Line] = []
        self._changed = asyncio.Event()
        self._began_at = boot_time()
        endpoints = self._set_up(folder)
        settings = WorkerSettings(self._names, endpoints, str(folder.path), plan.seed, self._cheat, os.getpid())
        self._workers = DemoWorkers(settings, folder, self._add_line)
        self._usable = 1
        # The fewer GPUs there are, the shorter each is held, so that every worker gets turns.
        self._pace = 1.0

    def _set_up(self, folder: DemoFolder) -> str:
        """Make what the workers will ask, without starting it; return its endpoints."""
        self._server = ServerProcess(SERVER_SETTINGS, folder=folder.path)
        self._announce(f"starting a server on {self._server.url} and {self._plan.workers} worker processes")
        return self._server.url

    async def run(self) -> Record:
        """Run the demo; Failure if it cannot run, or does not end in time."""
        shown = asyncio.create_task(self._show())
        try:
            async with asyncio.timeout(self._plan.longest_s):
                with self._view:
                    pool = await self._start()
                    await self._compete()
                    await self._finish()
                    self._workers.close()
                    await self._record_end()
                    await self._stop()
        except TimeoutError:
            raise Failure("the demo did not end in time; is this machine very busy?", 1) from None
        except ServerDidNotStartError as error:
            raise Failure(f"the server of the demo did not start: {last_line(str(error))}", 1) from None
        finally:
            shown.cancel()
            self._close()
            self._workers.close()
        took_s = boot_time() - self._began_at
        return Record(self._lines, pool["source"], len(pool["gpus"]), self._plan.workers, self._plan.seed, took_s)

    async def _stop(self) -> None:
        await asyncio.to_thread(self._server.stop, STOPPING_S)

    def _close(self) -> None:
        self._server.close()

    async def _show(self) -> None:
        while True:
            if self._scene.is_up and (pool := await self._pool()):
                self._scene.queue = [lease["labels"].get("demo", "?") for lease in pool["queue"]]
                self._scene.why = pool["queue"][0]["reason"] if pool["queue"] else ""
            self._changed.set()
            self._view.refresh()
            await asyncio.sleep(FRAME_S)

    async def _start(self) -> dict[str, Any]:
        """Start the server while the workers start; return its first `/pool`."""
        pool = await self._start_servers()
        number, is_simulated = len(pool["gpus"]), pool["source"] == "simulated"
        gpus = count(number, "simulated GPU") if is_simulated else f"{count(number, 'GPU')} of this machine"
        self._scene.title = f"{gpus}, {self._plan.workers} worker processes"
        self._scene.spans = {self._gpu_name(gpu): [] for gpu in pool["gpus"]}
        self._scene.is_up = True
        self._usable = max(sum(gpu["state"] == "free" for gpu in pool["gpus"]), 1)
        self._pace = min(1.0, 3 * self._usable / self._plan.workers)
        await self._until(lambda: not self._scene.in_state("starts"), self._starting_s)
        if self._scene.in_state("starts"):
            raise Failure(f"the workers of the demo did not start: {self._workers.last_error()}", 1)
        return pool

    def _gpu_name(self, gpu: dict[str, Any]) -> str:
        return str(gpu["gpu_id"])

    async def _start_servers(self) -> dict[str, Any]:
        """Use the machine's GPUs if some are visible and free, but no more than the workers can compete for."""
        simulated = {"SIMULATED_GPUS": SIMULATED if self._plan.gpus is None else str(self._plan.gpus)}
        installed = _installed_gpus() if self._plan.gpus is None else []
        visible = os.environ.get(VISIBLE)
        if not is_any_visible(visible, installed):
            if installed:
                self._announce(f"{VISIBLE} shows no GPU of this machine: simulated ones take their place")
            return await self._start_server(simulated)
        pool = await self._start_server({"SIMULATED_GPUS": ""} | ({} if visible is None else {VISIBLE: visible}))
        free, most = [gpu["uuid"] for gpu in pool["gpus"] if gpu["state"] == "free"], max(1, self._plan.workers // 3)
        if free and len(pool["gpus"]) <= most:
            return pool
        await asyncio.to_thread(self._server.stop, STOPPING_S)
        if free:
            return await self._start_server({VISIBLE: ",".join(free[:most])})
        self._announce("all GPUs of this machine are in use, and are left alone: simulated ones take their place")
        self._server.env.pop(VISIBLE, None)
        return await self._start_server(simulated)

    async def _start_server(self, settings: dict[str, str]) -> dict[str, Any]:
        self._server.env |= settings
        self._server.launch()
        await asyncio.to_thread(self._server.wait_until_ready)
        pool = await self._pool()
        if pool is None:
            raise Failure("the server of the demo has started and does not answer; is this machine very busy?", 1)
        return pool

    async def _compete(self) -> None:
        now = boot_time()
        self._scene.began_at = now
        # A slow machine takes longer to start, and competes for a shorter time.
        ends_at = min(now + self._plan.seconds, self._began_at + self._plan.longest_s - _ENDING_S)
        self._workers.start(self._pace)
        self._announce(f"{self._plan.workers} workers ask for {count(len(self._scene.spans), 'GPU')}", "bold")
        await asyncio.sleep((ends_at - now) * _WORKER_DIES)
        await self._kill_worker(ends_at)
        await asyncio.sleep(max(now + (ends_at - now) * _SERVER_DIES - boot_time(), 0.0))
        await self._break(ends_at)
        await asyncio.sleep(max(ends_at - boot_time(), 0.0))

    async def _kill_worker(self, ends_at: float) -> None:
        def victims() -> list[WorkerRow]:
            soon = boot_time() + 0.3 * self._pace
            return [row for row in self._scene.in_state("holds") if row.until > soon and row.name != self._cheat]

        await self._until(lambda: bool(victims() and self._scene.queue), min(self._patience_s, ends_at - boot_time()))
        victim = max(victims(), key=lambda row: row.until, default=None)
        if victim is None:
            return
        at = boot_time()
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGKILL)
        _, waiting = open_at(RunHistory(self._lines), at)
        self._record("killed", at, worker=victim.name, has_waiters=bool(waiting))
        self._scene.worker_killed(at, victim)

    async def _break(self, ends_at: float) -> None:
        """Kill the server."""
        await self._await_holders(ends_at)
        killed_at, pid = boot_time(), self._server.pid
        self._server.kill()
        self._note_away(killed_at, "server", f"the server (pid {pid}), with all leases")
        await asyncio.sleep(_AWAY_S)
        self._server.launch()
        await asyncio.to_thread(self._server.wait_until_ready)
        await self._note_back(killed_at, "server")

    async def _await_holders(self, ends_at: float) -> None:
        """Wait until most GPUs are held for a while, so that there is something to keep."""

        def is_good() -> bool:
            late, held = boot_time() + 1.2 * self._pace, self._scene.in_state("holds")
            return len(held) >= self._usable and sum(row.until > late for row in held) >= min(2, self._usable)

        await self._until(is_good, min(0.15 * self._plan.seconds, ends_at - boot_time()))
        await self._until(lambda: bool(self._scene.in_state("holds")), ends_at - boot_time())

    def _note_away(self, at: float, what: str, text: str) -> None:
        self._record("server_killed", at, which=what)
        self._scene.server_killed(at, what, text)

    async def _note_back(self, killed_at: float, what: str) -> None:
        back_at = boot_time()
        self._record("server_back", back_at, which=what)
        self._scene.is_up, self._scene.away[-1].ended_at = True, back_at
        leases = itertools.chain(*open_at(RunHistory(self._lines), killed_at))
        await asyncio.gather(*(self._record_lease(lease.who, lease.key, lease.id) for lease in leases))
        await asyncio.sleep(2 * FRAME_S)  # by then a worker that released has written so
        held, kept, waiting, places = survival(RunHistory(self._lines), killed_at)
        text = f"{kept} of {held} leases and {places} of {waiting} queue positions are as before"
        style = "green" if (kept, places) == (held, waiting) else "bold red"
        self._announce(f"{self._back[what]} after {back_at - killed_at:.1f} s: {text}", style)

    async def _record_lease(self, worker: str, key: str, lease_id: str) -> None:
        """Read a lease in its worker's place, and add the answer to the worker's lines."""
        sent, answer = boot_time(), await self._ask(f"{self._scope}/leases/{lease_id}")
        found = answer.json if answer is not None and answer.status == 200 else {}
        facts = {name: found.get(name) for name in ("state", "fence", "end_reason")}
        uuids, status = [gpu["uuid"] for gpu in found.get("gpus", ())], 200 if found else 404
        line = {"what": "answered", "who": worker, "at": boot_time(), "lease": key, "call": "GET", "sent": sent}
        self._lines.append({**line, "status": status, "uuids": uuids, **facts})

    async def _finish(self) -> None:
        """Stop new requests, and serve the workers that wait."""
        self._announce("no new requests; the waiters are still served", "bold")
        self._workers.finish()
        await self._until(lambda: not self._scene.in_state("rests", "waits", "holds"), _FINISHING_S)
        if self._scene.in_state("rests", "waits", "holds") and (pool := await self._pool()):
            free = [self._gpu_name(gpu) for gpu in pool["gpus"] if gpu["state"] == "free"]
            self._record("pool", leases=[lease["id"] for lease in (*pool["leases"], *pool["queue"])], free=free)

    async def _record_end(self) -> None:
        """Record the leases that are left once the server has noticed that all workers are gone."""
        until = boot_time() + _NOTICING_S
        while pool := await self._pool():
            live = [lease for lease in (*pool["leases"], *pool["queue"]) if lease["state"] != "draining"]
            if not live or boot_time() >= until:
                self._record("final", leases=[f"{lease['id']} is still {lease['state']}" for lease in live], gpus=[])
                return
            await asyncio.sleep(FRAME_S)

    def _add_line(self, line: Line) -> None:
        self._lines.append(line)
        self._scene.add_line(line)
        self._changed.set()

    def _record(self, what: str, at: float | None = None, **facts: Any) -> None:
        self._lines.append({"what": what, "who": "demo", "at": boot_time() if at is None else at, **facts})

    def _announce(self, text: str, style: str = "") -> None:
        self._scene.announce(boot_time(), text, style)

    async def _until(self, is_so: Callable[[], bool], limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not is_so():
                    await self._changed.wait()
                    self._changed.clear()

    async def _pool(self) -> dict[str, Any] | None:
        answer = await self._ask(f"{self._scope}/pool")
        return answer.json if answer is not None and answer.status == 200 else None

    async def _ask(self, path: str) -> Answer | None:
        try:
            return await asyncio.wait_for(asyncio.to_thread(self._server.ask, path), CALL_S)
        except (OSError, http.client.HTTPException):
            return None


def is_any_visible(value: str | None, installed: Sequence[InstalledGpu]) -> bool:
    """Whether a value of CUDA_VISIBLE_DEVICES allows a GPU of this machine. A value that names none of them does not,
    although a server would then show all.
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
    with contextlib.closing(probe):
        readings = probe.read(boot_time()).readings
        return [InstalledGpu(reading.gpu.index, reading.gpu.key.uuid) for reading in readings]
