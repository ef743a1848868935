"""The workers of a run, and what is done to them: killed, and stopped for about a TTL."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.e2e.worker import NoAnswer, Orders, now

from .scene import Fault, Scene

WORKER = Path(__file__).parent.with_name("worker.py")
PYTHON = (sys.executable, "-I", "-S")
# What the server must keep to when it is well; the TTL of local workers leaves more than that at any time.
NOTICES_WITHIN_S = 2.0
GETS_WITHIN_S = 60.0


class Crew:
    """All workers that live."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.say = scene.recorder.say
        self.random = scene.random
        self.workers: dict[str, tuple[Orders, subprocess.Popen[bytes]]] = {}
        # Nothing is done to these: they are stopped already, or are there for another fault.
        self.spared: set[str] = set()

    def faults(self) -> dict[str, Fault]:
        return {"kill_worker": self.kill, "stop_worker": self.stop}

    def start(self, role: Orders, *, is_spared: bool = False) -> str:
        name = f"w{self.scene.recorder.counts['worker_started']}"
        port = role.port or self.scene.proxy.port
        orders = replace(role, name=name, port=port, folder=str(self.scene.folder))
        self.workers[name] = (orders, _popen((*PYTHON, str(WORKER), orders.encoded()), self.scene.folder))
        if is_spared:
            self.spared.add(name)
        self.say("worker_started", worker=name, is_local=orders.is_local)
        return name

    def pick(self) -> str | None:
        """One that is not stopped; those who have a GPU are the more interesting ones. What happens to one with a long TTL
        would not be over by the end of a short calm, so it is left alone then.
        """
        too_slow = {name for name, (orders, _) in self.workers.items() if orders.ttl_s > self.scene.plan.calm_s - 2}
        running = sorted(set(self.workers) - self.spared - too_slow)
        holders = [name for name in running if self.held_by(name) is not None]
        return self.random.choice(holders or running) if running else None

    def held_by(self, name: str) -> str | None:
        """The lease that this worker is about to use, by its history; the outermost where one is inside another."""
        held: list[str] = []
        path = self.scene.folder / f"{name}.history"
        for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            if text.startswith('{"what": "took"'):
                held.append(json.loads(text)["lease"])
            elif text.startswith('{"what": "left"'):
                held.remove(json.loads(text)["lease"])
        return held[0] if held else None

    async def until_held(self, names: Sequence[str]) -> None:
        gives_up_at = now() + GETS_WITHIN_S
        while not all(self.held_by(name) for name in names):
            assert now() < gives_up_at, f"{names} got no GPU"
            await asyncio.sleep(0.05)

    async def kill(self) -> None:
        name = self.pick()
        if name is None:
            return
        orders, process = self.workers.pop(name)
        killed_at = now()
        process.kill()
        process.wait()
        reaped_at = now()
        held = self.held_by(name)
        self.say("killed", worker=name, at=killed_at, reaped_at=reaped_at, lease=held or "")
        self.start(orders)
        if held is not None and orders.is_local:
            await self.see_death_noticed(held, reaped_at)

    async def see_death_noticed(self, lease: str, died_at: float) -> None:
        """A server that is well all the while, and has been for a second, ends the lease long before its TTL."""
        state, server = "", self.scene.server
        while (after_s := now() - died_at) < NOTICES_WITHIN_S:
            if not server.is_well or not server.is_running or died_at - server.was_unwell_at < 1.0:
                return
            try:
                status, answer = await server.look_up(f"/leases/{lease}")
            except NoAnswer:
                return
            state = answer.get("state", str(status))
            if status == 200 and state in {"ended", "draining"}:
                self.say("death_noticed", lease=lease, after_s=after_s)
                return
            await asyncio.sleep(0.02)
        self.say("death_unnoticed", lease=lease, state=state, after_s=after_s)

    async def stop(self) -> None:
        """For longer than its TTL, most of the time."""
        name = self.pick()
        if name is None:
            return
        orders, process = self.workers[name]
        self.spared.add(name)
        stop_s = orders.ttl_s * self.random.uniform(0.7, 1.3)
        self.say("worker_stopped", worker=name, for_s=stop_s, lease=self.held_by(name) or "")
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(stop_s)
        process.send_signal(signal.SIGCONT)
        self.say("worker_continued", worker=name)
        self.spared.discard(name)

    async def end(self, names: Sequence[str]) -> None:
        """Tell them to end, and wait until they have."""
        ended = [(name, self.workers[name][1]) for name in names]
        for _, process in ended:
            process.terminate()
        for name, process in ended:
            code = await asyncio.to_thread(process.wait, 20.0)
            assert code == 0, f"worker {name} ended with {code}: {(self.scene.folder / 'workers.log').read_text()}"
            del self.workers[name]

    def clean_up(self) -> None:
        for _, process in self.workers.values():
            process.kill()
            process.wait()


def _popen(command: tuple[str, ...], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "workers.log").open("ab") as log:
        return subprocess.Popen(command, env={}, cwd=folder, stdout=log, stderr=log)
