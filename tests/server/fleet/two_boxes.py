"""Two real servers on loopback: gpu-01 leads a pool with GPUs of both, gpu-02 passes calls on. The link between them is real,
without a network under it; who leads is said by hand.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn

from gpu_worker_pool.core.fleet.boxes import BoxInfo
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, InventoryGpu, Reading
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.server.agent.agent import Agent
from gpu_worker_pool.server.agent.frames import Ask
from gpu_worker_pool.server.agent.handshake import FleetKey, Hello, new_nonce
from gpu_worker_pool.server.agent.link import BoxLink, LinkLost, LinkReply, Serve
from gpu_worker_pool.server.app import PoolApp, create_app
from gpu_worker_pool.server.fleet_part import keeper_of
from gpu_worker_pool.server.http.forwarded import PassedOnCalls
from gpu_worker_pool.server.http.protocol import BoundedProtocol
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.wire.leases import NotRenewed, Renewed
from gpu_worker_pool.wire.pool import RENEW_AT_BOX, BoxRenewAnswer

# Simulated GPUs are named after their node, and tests that run at the same time must not lock each other's.
LEADER, OTHER = (f"gpu-{number}-{os.getpid()}" for number in ("01", "02"))
TOKENS = "admin:the-secret-of-admin,ada:the-secret-of-ada"
FLEET_KEY = FleetKey("a key that all boxes of the fleet have")


class MemorySocket:
    """One end of a connection in memory. Closing one closes both."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.other = self
        self._noted: asyncio.Future[bytes] | None = None

    async def send(self, frame: bytes) -> None:
        self.other.frames.put_nowait(frame)
        if self._noted is not None and not self._noted.done():
            self._noted.set_result(frame)

    async def receive(self) -> bytes:
        if (frame := await self.frames.get()) is None:
            raise LinkLost("the connection broke")
        return frame

    async def next_sent(self) -> bytes:
        self._noted = asyncio.get_running_loop().create_future()
        return await self._noted

    def close(self) -> None:
        for end in (self, self.other):
            end.frames.put_nowait(None)


async def never(ask: Ask, body: bytes, reply: LinkReply) -> None:
    """A box that takes a call and says nothing."""
    await reply.gone


@asynccontextmanager
async def linked(at_leader: Serve, at_box: Serve = never) -> AsyncIterator[tuple[BoxLink, BoxLink, MemorySocket]]:
    """The end of the box and that of the leader, and the connection of the box."""
    own, other = MemorySocket(), MemorySocket()
    own.other, other.other = other, own
    hello, challenge = Hello(OTHER, new_nonce(), "1"), Hello(LEADER, new_nonce(), "1")
    box = BoxLink(own, FLEET_KEY.seal("agent", hello, challenge), LEADER)
    leader = BoxLink(other, FLEET_KEY.seal("leader", hello, challenge), OTHER)
    running = [
        asyncio.ensure_future(box.run(Hello, lambda _: None, at_box)),
        asyncio.ensure_future(leader.run(Hello, lambda _: None, at_leader)),
    ]
    try:
        yield box, leader, own
    finally:
        own.close()
        await asyncio.gather(*running, return_exceptions=True)


@dataclass
class HandMadeMembership:
    """The link between two boxes, as a plain object. `kept` are the owners of the leases that this box keeps."""

    node: str
    is_leader: bool = False
    leader_url: str | None = None
    leader: BoxLink | None = None
    trouble: str | None = None
    boxes: Mapping[str, str] = field(default_factory=dict)
    pool_id: str | None = None
    box_infos: Mapping[str, BoxInfo] = field(default_factory=dict)
    links: dict[str, BoxLink] = field(default_factory=dict)
    kept: dict[str, str | None] = field(default_factory=dict)
    renewals: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def why_waiting(self) -> str | None:
        return self.trouble

    def kept_pool(self, settings: PoolSettings) -> PoolState:
        return PoolState(settings=settings)

    async def ask_box(self, node: str, target: str, body: bytes, timeout_s: float) -> bytes | None:
        link = self.links.get(node)
        if link is None:
            return None
        answer = link.ask("POST", target, body=body)
        await answer.begun
        return answer.whole

    async def renew(
        self,
        lease_ids: Sequence[str],
        caller_may: Callable[[str | None], bool],
        *,
        wait_s: float = 0.0,
        warned: Collection[str] = (),
    ) -> BoxRenewAnswer:
        elsewhere = tuple(id_ for id_ in lease_ids if id_ not in self.kept and not id_.startswith("over"))
        denied = tuple(
            f"{id_} (of {self.kept[id_]})" for id_ in lease_ids if id_ in self.kept and not caller_may(self.kept[id_])
        )
        if denied:
            return BoxRenewAnswer(denied=denied)
        here = tuple(id_ for id_ in lease_ids if id_ in self.kept)
        self.renewals.append(here)
        lost = tuple(NotRenewed(id=id_, reason="expired") for id_ in lease_ids if id_.startswith("over"))
        return BoxRenewAnswer(
            renewed=tuple(Renewed(id=id_, expires_in_s=60.0) for id_ in here), lost=lost, elsewhere=elsewhere
        )


@dataclass
class Box:
    app: PoolApp
    url: str
    membership: HandMadeMembership

    async def ask(
        self, path: str, method: str = "GET", body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """The status and the JSON of an answer; its headers are in `answered`."""
        async with self.answering(path, method, body, headers) as (status, reader):
            length = 0 if method == "HEAD" else int(self.answered.get("content-length", 0))
            data = json.loads(await reader.readexactly(length)) if length else None
            return status, data

    @asynccontextmanager
    async def answering(
        self, path: str, method: str = "GET", body: Any = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[tuple[int, asyncio.StreamReader]]:
        """The status of an answer, and what comes after its head. The caller goes away at the end."""
        host, port = self.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            sent = b"" if body is None else json.dumps(body).encode()
            said = {"Host": f"{host}:{port}", "Content-Length": str(len(sent)), **(headers or {})}
            head = "".join(f"{name}: {value}\r\n" for name, value in said.items())
            writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + sent)
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
            pairs = [line.partition(": ") for line in lines[1:] if line]
            self.answered = {name.lower(): value for name, _, value in pairs}
            yield int(lines[0].split()[1]), reader
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


@dataclass
class TwoBoxes:
    leader: Box
    other: Box
    connection: MemorySocket

    def pass_to(self, link: BoxLink | None) -> None:
        """The box that does not lead has this link to the leader from now on."""
        self.other.membership.leader = link

    async def read_the_other(self, gpus: int = 2) -> None:
        """gpu-02 has been read: the leader has these readings from its agent."""
        driver = self.leader.app.pool._driver
        keys = [GpuKey(OTHER, f"GPU-other-{index}") for index in range(gpus)]
        installed = tuple(InventoryGpu(key.uuid, index, "NVIDIA A100", 80_000.0) for index, key in enumerate(keys))
        driver.note(cmd.AnnounceNode(OTHER, "a boot", installed))
        readings = tuple(
            Reading(Gpu(key, index, "NVIDIA A100"), driver.now(), 80_000.0, 0.0, 0.0, processes=())
            for index, key in enumerate(keys)
        )
        driver.note(cmd.Observe(readings))
        await self.leader.app.pool.caught_up()


async def until(look: Callable[[], bool]) -> None:
    """Wait for something that tells nobody."""
    while not look():  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.005)


@asynccontextmanager
async def two_boxes(folder: Path, **settings: Any) -> AsyncIterator[TwoBoxes]:
    async with (
        _served(folder / "1", LEADER, settings) as leader,
        _served(folder / "2", OTHER, settings) as other,
        AsyncExitStack() as stack,
    ):
        passed_on = PassedOnCalls(leader.app, "", partial(keeper_of, leader.app.pool))

        async def answer(ask: Ask, body: bytes, reply: LinkReply) -> None:
            if ask.target == RENEW_AT_BOX:
                await leader.app._renewals.answer_box(ask, body, reply)
            else:
                await passed_on.answer(OTHER, ask, body, reply)

        box_end, leader_end, connection = await stack.enter_async_context(
            linked(answer, other.app._renewals.answer_box)
        )
        boxes = {LEADER: leader.url, OTHER: other.url}
        leader.membership.is_leader = True
        leader.membership.links, other.membership.links = {OTHER: leader_end}, {LEADER: box_end}
        now = leader.app.pool.now()
        leader.membership.box_infos = {
            LEADER: BoxInfo(leader.url, "1.0", is_candidate=True, is_up=True, heard_at=now),
            OTHER: BoxInfo(other.url, "1.0", is_candidate=False, is_up=False, heard_at=now - 5.0),
        }
        other.membership.leader_url, other.membership.leader = leader.url, box_end
        for box in (leader, other):
            box.membership.boxes = boxes
            box.app.pool.membership = cast("Agent", box.membership)
        found = TwoBoxes(leader, other, connection)
        await found.read_the_other()
        yield found


@asynccontextmanager
async def _served(folder: Path, node: str, settings: Mapping[str, Any]) -> AsyncIterator[Box]:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    usual = {"simulated_gpus": "2", "gpu_pool_tokens": TOKENS, "refresh_interval": 5.0}
    app = create_app(
        ServerSettings(_env_file=None, gpu_pool_state_dir=str(folder), gpu_pool_node=node, **{**usual, **settings})
    )
    config = uvicorn.Config(app, log_config=None, http=BoundedProtocol, ws="none", proxy_headers=False)
    server = uvicorn.Server(config)
    running = asyncio.ensure_future(server._serve(sockets=[listener]))
    await until(lambda: server.started or running.done())
    try:
        yield Box(app, url, HandMadeMembership(node))
    finally:
        app._stop_waiting()
        server.should_exit = True
        await running
        listener.close()
