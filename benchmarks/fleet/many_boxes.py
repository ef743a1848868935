"""Many boxes in one process: each has a connection to the leader of its own, the machine of an agent, and GPUs that are made up.

They keep nothing on a disk, so a hand-over lacks one write to the disk of its box.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from benchmarks.processes import Child, orders, say
from gpu_worker_pool.core.fleet.custody import Custody
from gpu_worker_pool.core.fleet.custody_actions import CloseLink, CustodyAction, LookNow, Send
from gpu_worker_pool.core.fleet.messages import LeaderMessage, Welcome
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, Reading
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.server.agent.connect import Connector
from gpu_worker_pool.server.agent.frames import Ask
from gpu_worker_pool.server.agent.handshake import VERSION, FleetKey
from gpu_worker_pool.server.agent.link import BoxLink, LinkLost, LinkReply
from gpu_worker_pool.server.box.snapshot import as_installed

GPUS_A_BOX = 8
MODEL = "Simulated A100"
EVERY_S = 1.0
# How many connections that have not proven their key the leader takes at a time.
AT_ONCE = 32
LIMIT_S = 120.0


def readings_of(node: str) -> tuple[Reading, ...]:
    """Readings of idle GPUs."""
    keys = [GpuKey(node, f"GPU-{node}-{index}") for index in range(GPUS_A_BOX)]
    return tuple(
        Reading(Gpu(key, index, MODEL), 0.0, 81920.0, 0.0, 0.0, processes=()) for index, key in enumerate(keys)
    )


class Box:
    """An agent that reads its GPUs every second, and always sees the same."""

    def __init__(self, number: int, url: str, key: FleetKey) -> None:
        self.node = f"box{number:05}"
        self._url, self._connector = url, Connector(self.node, key)
        self._readings = readings_of(self.node)
        self._custody = Custody(self.node, f"machine-{number}", "boot", boot_time())
        self._link: BoxLink | None = None
        self.is_welcome = asyncio.Event()
        # How often it has lost its leader.
        self.losses = 0

    async def stay(self, first: float, room: asyncio.Semaphore) -> None:
        """Be a box of the fleet, and join it again whenever the connection ends."""
        asyncio.get_running_loop().call_later(first, self._look_again)
        while True:
            try:
                await self._join(room)
            except LinkLost:
                self.losses += self.is_welcome.is_set()
                self._link = None
                self.is_welcome.clear()
                self._custody.disconnected()
                await asyncio.sleep(EVERY_S)

    async def _join(self, room: asyncio.Semaphore) -> None:
        async with room:
            self._link, _ = await self._connector.connect(self._url)
            link = self._link
            installed = tuple(map(as_installed, self._readings))
            link.send(self._custody.announce(f"http://{self.node}:8000", VERSION, False, installed))  # noqa: FBT003
            running = asyncio.ensure_future(link.run(LeaderMessage, self._take, _answer_nothing))
            welcome = asyncio.ensure_future(self.is_welcome.wait())
            await asyncio.wait((running, welcome), return_when="FIRST_COMPLETED")
            welcome.cancel()
        await running

    def _take(self, message: LeaderMessage) -> None:
        self._carry_out(self._custody.take(message, boot_time()))
        if isinstance(message, Welcome):
            self.is_welcome.set()

    def _look_again(self) -> None:
        asyncio.get_running_loop().call_later(EVERY_S, self._look_again)
        self._carry_out(self._custody.tick(boot_time()))
        self._look()

    def _look(self) -> None:
        began = boot_time()
        report = self._custody.report([replace(reading, at=began) for reading in self._readings], began)
        if report is not None and self._link is not None:
            self._link.send(report)

    def _carry_out(self, actions: Sequence[CustodyAction]) -> None:
        for action in actions:
            match action:
                case Send(message=message) if self._link is not None:
                    self._link.send(message)
                case LookNow():
                    self._look()
                case CloseLink(why=why) if self._link is not None:
                    self._link.drop(why)


async def _answer_nothing(ask: Ask, body: bytes, reply: LinkReply) -> None:  # noqa: ARG001 - as all others
    await reply.begin(404)


async def be_boxes(number: int, url: str, key: str) -> None:
    """Be this number of boxes, until the process that started this one closes the pipe."""
    room = asyncio.Semaphore(AT_ONCE)
    boxes = [Box(each, url, FleetKey(key)) for each in range(number)]
    staying = [asyncio.ensure_future(box.stay(EVERY_S * place / number, room)) for place, box in enumerate(boxes)]
    for box in boxes:
        await box.is_welcome.wait()
    say("all boxes have joined")
    await asyncio.to_thread(lambda: list(orders()))
    say(sum(box.losses for box in boxes))
    for task in staying:
        task.cancel()


class ManyBoxes(Child):
    """A number of boxes, in a process of their own. It says when all have joined."""

    def __init__(self, number: int, url: str, key: str) -> None:
        super().__init__([sys.executable, "-m", "benchmarks.fleet.many_boxes", str(number), url, key])

    def losses(self) -> int:
        """End the boxes; return how often a box lost its leader."""
        self.let_end()
        return int(self.hear(LIMIT_S))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(be_boxes(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
