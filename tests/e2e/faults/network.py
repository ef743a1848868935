"""Faults of the network: cut for a while, and an onlooker who hangs up. What happens to a single request is in proxy.py."""

from __future__ import annotations

import asyncio

from tests.e2e.worker import NoAnswer

from .scene import Fault, Scene


class NetworkFaults:
    """What is done between the workers and the server."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    def faults(self) -> dict[str, Fault]:
        return {"cut_network": self.cut}

    async def cut(self) -> None:
        self.scene.recorder.say("network_cut")
        self.scene.proxy.is_cut = True
        self.scene.proxy.cut()
        await asyncio.sleep(self.scene.random.uniform(0.1, 1.5))
        self.scene.proxy.is_cut = False
        self.scene.recorder.say("network_restored")

    async def look_on(self) -> None:
        """Watch all leases that wait, with curl, and press Ctrl-C; a client that asks again on a new connection before
        the server sees that its old one is gone does the same. It is nobody else's business.
        """
        server = self.scene.server
        while True:
            await asyncio.sleep(self.scene.random.uniform(0.1, 0.5))
            try:
                _, pool = await server.look_up("/pool")
            except NoAnswer:
                continue
            queue = self.scene.random.sample(pool["queue"], min(len(pool["queue"]), 20))
            watching = [server.look_up(f"/leases/{lease['id']}?wait_s=10", 0.2) for lease in queue]
            seen = await asyncio.gather(*watching, return_exceptions=True)
            self.scene.recorder.counts["onlooker_hung_up"] += sum(isinstance(answer, NoAnswer) for answer in seen)
