"""A second server on the same GPUs, by another Unix user, with its own port and state directory. It comes and goes.

While the first server has the GPUs, the second must grant none, also after the first has been killed: it may only be
restarting. A second server that comes while the first is away takes the GPUs, and knows no lease of the first one. That is
for operators to avoid, and does not happen here.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gpu_worker_pool.testing import COMMAND, ServerProcess
from tests.e2e.worker import call
from tests.other_user import ALICE, command_as, folder_of

from .scene import Fault, Scene

PATIENCE_S = 10.0


class SecondServer:
    """One that is started again and again, and what it is asked."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.first = scene.server
        self.one_at_a_time = asyncio.Lock()
        # Other users do not reach the folder of a test.
        self.place = TemporaryDirectory(prefix="gpu-pool-second-")
        folder = Path(self.place.name)
        command = command_as(ALICE, *COMMAND[1:])
        if isinstance(command, str):
            scene.recorder.say("no_other_user", why=command)
            command = [*COMMAND]
        else:
            folder.chmod(0o755)
            folder = folder_of(ALICE, folder / "alice")
        settings = {**self.first.shared_settings, "GPU_POOL_LOCK_SCOPE": self.first.scope}
        self.server = ServerProcess(settings, command=command, folder=folder)
        self.asked = 0
        # A first server that is started meanwhile may find that this one has the GPUs, and would not take them later.
        self.is_looking = False

    def faults(self) -> dict[str, Fault]:
        return {"second_server": self.come_and_go}

    async def come_and_go(self) -> None:
        """While the first is up. Where that was killed before the second had looked, either may have the GPUs."""
        is_clear = False
        while not is_clear:
            await self.first.until_well()
            async with self.one_at_a_time:
                if (authority := self.first.authority) is None:
                    continue
                is_clear = await self.come_once(authority)
            if not is_clear:
                self.scene.recorder.say("second_server_unclear")

    async def come_once(self, authority: int) -> bool:
        """Whether the same process had the GPUs all the while that the second took to look for them."""
        self.is_looking = True
        try:
            self.server.launch()
            await asyncio.to_thread(self.server.wait_until_ready)
            await self.until_read()
            is_clear = authority == self.first.authority
            self.is_looking = not is_clear
            for _ in range(self.scene.random.randint(1, 3) if is_clear else 0):
                await self.ask()
                await asyncio.sleep(self.scene.random.uniform(0.1, 0.6))
        finally:
            self.server.kill()
            self.is_looking = False
        return is_clear

    async def until_read(self) -> None:
        """From then on it has the GPUs or knows that another server has them. Its pool may know GPUs from an earlier time, before
        it has looked; these are of the first reading. That takes a second for each GPU of a server that stands still.
        """
        while not (await self.call("GET", "/gpu/count"))[1]["gpu_count"]:  # noqa: ASYNC110 - a server tells nobody
            await asyncio.sleep(0.02)

    async def ask(self) -> None:
        """Ask for all GPUs one by one, for a share, and give back what it granted."""
        granted: list[str] = []
        forms: list[dict[str, object]] = [{}] * self.scene.plan.gpus + [{"memory_mb": 1000.0}]
        paths = [f"/leases/second-{os.getpid()}-{self.asked + number}" for number in range(len(forms))]
        self.asked += len(forms)
        for path, form in zip(paths, forms, strict=True):
            _, answer = await self.call("PUT", path, {**form, "ttl_s": 5.0})
            if answer.get("state") == "active":
                granted += [gpu["uuid"] for gpu in answer["gpus"]]
        self.scene.recorder.say("second_server", granted=granted)
        self.scene.recorder.counts["second_server_beside_first"] += 1
        self.scene.recorder.counts["second_server_granted"] += len(granted)
        for path in paths:
            await self.call("DELETE", path)

    async def call(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        return await asyncio.to_thread(call, self.server.port, method, path, body, PATIENCE_S)

    def clean_up(self) -> None:
        self.server.close()
        self.place.cleanup()
