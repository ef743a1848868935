"""Two real servers on loopback: gpu-01 leads a pool with GPUs of both, gpu-02 passes calls on. Only the link between them
is made by hand.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn

from gpu_worker_pool.core.fleet.boxes import BoxInfo
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, InventoryGpu, Reading
from gpu_worker_pool.server.agent.membership import BoxRenewal
from gpu_worker_pool.server.app import PoolApp, create_app
from gpu_worker_pool.server.http.protocol import BoundedProtocol
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.wire.leases import NotRenewed, Renewed

# Simulated GPUs are named after their node, and tests that run at the same time must not lock each other's.
LEADER, OTHER = (f"gpu-{number}-{os.getpid()}" for number in ("01", "02"))
KEY = "the key that the leader gave to gpu-02"
TOKENS = "admin:the-secret-of-admin,ada:the-secret-of-ada"
FLEET_KEY = "a key that all boxes of the fleet have"


@dataclass
class HandMadeMembership:
    """The link between two boxes, as a plain object. `kept` are the owners of the leases that this box keeps."""

    node: str
    is_leader: bool = False
    leader_url: str | None = None
    key: str | None = None
    trouble: str | None = None
    boxes: Mapping[str, str] = field(default_factory=dict)
    pool_id: str | None = None
    box_infos: Mapping[str, BoxInfo] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str | None] = field(default_factory=dict)
    renewals: list[tuple[str, ...]] = field(default_factory=list)

    def node_of_key(self, key: str) -> str | None:
        return self.keys.get(key)

    async def renew(
        self,
        lease_ids: Sequence[str],
        caller_may: Callable[[str | None], bool],
        *,
        wait_s: float = 0.0,
        warned: Collection[str] = (),
    ) -> BoxRenewal:
        elsewhere = tuple(id_ for id_ in lease_ids if id_ not in self.kept and not id_.startswith("over"))
        denied = tuple(
            (id_, self.kept[id_]) for id_ in lease_ids if id_ in self.kept and not caller_may(self.kept[id_])
        )
        if denied:
            return BoxRenewal(denied=denied)
        here = tuple(id_ for id_ in lease_ids if id_ in self.kept)
        self.renewals.append(here)
        lost = tuple(NotRenewed(id=id_, reason="expired") for id_ in lease_ids if id_.startswith("over"))
        return BoxRenewal(tuple(Renewed(id=id_, expires_in_s=60.0) for id_ in here), lost, elsewhere)


@dataclass
class Box:
    app: PoolApp
    url: str
    membership: HandMadeMembership
    session: aiohttp.ClientSession

    async def ask(
        self, path: str, method: str = "GET", body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """The status and the JSON of an answer; its headers are in `answered`."""
        async with self.session.request(method, f"{self.url}{path}", json=body, headers=headers) as answer:
            self.answered = answer.headers
            data = await answer.json(content_type=None) if method != "HEAD" else None
            return answer.status, data


@dataclass
class TwoBoxes:
    leader: Box
    other: Box

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
        aiohttp.ClientSession() as session,
        _served(folder / "1", LEADER, session, settings) as leader,
        _served(folder / "2", OTHER, session, settings) as other,
    ):
        boxes = {LEADER: leader.url, OTHER: other.url}
        leader.membership.is_leader = True
        leader.membership.keys = {KEY: OTHER}
        now = leader.app.pool.now()
        leader.membership.box_infos = {
            LEADER: BoxInfo(leader.url, "1.0", is_candidate=True, is_up=True, heard_at=now),
            OTHER: BoxInfo(other.url, "1.0", is_candidate=False, is_up=False, heard_at=now - 5.0),
        }
        other.membership.leader_url, other.membership.key = leader.url, KEY
        for box in (leader, other):
            box.membership.boxes = boxes
            box.app.pool.membership = box.membership
        found = TwoBoxes(leader, other)
        await found.read_the_other()
        yield found


@asynccontextmanager
async def _served(
    folder: Path, node: str, session: aiohttp.ClientSession, settings: Mapping[str, Any]
) -> AsyncIterator[Box]:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    usual = {"simulated_gpus": "2", "gpu_pool_tokens": TOKENS, "refresh_interval": 5.0}
    app = create_app(
        ServerSettings(_env_file=None, gpu_pool_state_dir=str(folder), gpu_pool_node=node, **{**usual, **settings})
    )
    app._renewals.secret = FLEET_KEY
    config = uvicorn.Config(app, log_config=None, http=BoundedProtocol, ws="none", proxy_headers=False)
    server = uvicorn.Server(config)
    running = asyncio.ensure_future(server._serve(sockets=[listener]))
    await until(lambda: server.started or running.done())
    try:
        yield Box(app, url, HandMadeMembership(node), session)
    finally:
        app._stop_waiting()
        server.should_exit = True
        await running
        listener.close()
