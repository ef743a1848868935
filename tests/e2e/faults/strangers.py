"""Strangers on the machine: processes outside the pool on its GPUs, and a user who asks for a thousand shares at once."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

from gpu_worker_pool.gpus.simulated import SimulatedProbe
from gpu_worker_pool.testing import inherited_environment
from tests.e2e.worker import Orders, now
from tests.other_user import BOB, command_as

from .scene import NODE, Fault, Scene
from .workers import Crew


class Strangers:
    """What others do beside the workers."""

    def __init__(self, scene: Scene, crew: Crew) -> None:
        self.scene = scene
        self.crew = crew
        self.say = scene.recorder.say
        probe = SimulatedProbe(NODE, str(scene.plan.gpus))
        self.uuids = {str(reading.gpu.index): reading.gpu.key.uuid for reading in probe.read(0.0).readings}
        self.outside: dict[str, list[dict[str, object]]] = {}
        self.is_flooding = False
        self.flooders: set[subprocess.Popen[bytes]] = set()

    def faults(self) -> dict[str, Fault]:
        return {"outsiders": self.come_and_go, "flood": self.flood}

    async def come_and_go(self) -> None:
        """A foreign process on a GPU, for longer than the server may take to see it. One GPU is left alone."""
        free = sorted(set(self.uuids) - set(self.outside))
        if len(free) < 2:
            return
        index = self.scene.random.choice(free)
        used = {"memory_mb": 20_000, "utilization_percent": 60}
        self.outside[index] = [{"pid": 4_000_000 + int(index), "user": "mallory", "name": "train.py", **used}]
        self.show()
        self.say("outsider_came", uuid=self.uuids[index])
        await self.scene.pause(self.scene.random.uniform(8.0, 12.0))
        self.say("outsider_left", uuid=self.uuids[index])
        del self.outside[index]
        self.show()

    def show(self) -> None:
        part = self.scene.server.outsiders.with_suffix(".part")
        part.write_text(json.dumps(self.outside), encoding="utf-8")
        part.replace(self.scene.server.outsiders)

    async def flood(self) -> None:
        """Tiny shares by the thousand, straight to the server; their holder leaves without giving half of them back. The
        heartbeats of others survive it.
        """
        if self.is_flooding:
            return
        self.is_flooding, server = True, self.scene.server
        await server.until_well()
        beating = self.crew.start(self.scene.plan.heartbeat_role(server.port), is_spared=True)
        await self.crew.until_held([beating])
        began_at, held = now(), self.crew.held_by(beating)
        await self.ask_for_shares()
        was_well = server.is_well and server.is_running and server.was_unwell_at < began_at
        if was_well and self.crew.held_by(beating) != held:
            self.say("starved", lease=held)
        self.scene.recorder.counts["flood_survived"] += was_well
        await self.crew.end([beating])
        self.is_flooding = False

    async def ask_for_shares(self) -> None:
        name = f"flood{self.scene.recorder.counts['flooded']}"
        server, memory_mb = self.scene.server, self.scene.random.randint(2, 50)
        orders = Orders(name, server.port, "", flood=self.scene.plan.shares, rounds=0, memory_mb=memory_mb, ttl_s=60.0)
        program = ("-m", "tests.e2e.worker", orders.encoded())
        command = command_as(BOB, *program)
        if isinstance(command, str):
            command = [sys.executable, *program]
        self.say("flooded", name=name)
        process = self.start(command, name)
        over = asyncio.ensure_future(asyncio.to_thread(process.wait))
        healing = asyncio.ensure_future(self.scene.is_healing.wait())
        await asyncio.wait({over, healing}, return_when=asyncio.FIRST_COMPLETED)
        healing.cancel()
        process.terminate()
        code = await over
        assert code == 0, f"{name} ended with {code}: {(self.scene.folder / 'workers.log').read_text()}"
        self.say("flood_over", name=name)
        self.flooders.discard(process)

    def start(self, command: list[str], name: str) -> subprocess.Popen[bytes]:
        folder = self.scene.folder
        with (folder / f"{name}.history").open("ab") as history, (folder / "workers.log").open("ab") as log:
            env = inherited_environment(os.environ)
            process = subprocess.Popen(command, env=env, cwd="/", stdout=history, stderr=log)
        self.flooders.add(process)
        return process

    def clean_up(self) -> None:
        for process in self.flooders:
            process.kill()
            process.wait()
