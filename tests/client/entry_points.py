"""Boxes of a fleet for tests of its callers: one real server behind several addresses, each a box with GPUs of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from gpu_worker_pool.testing import ServerProcess
from tests.client.foreign_servers import ForeignServer, Seen, answering

NOBODY_LEADS = (503, {"detail": "Nobody leads this fleet at present; ask again in a moment."})


class EntryPoint(ForeignServer):
    """A box of a fleet. What it is asked under /fleet it passes on to the server; GPUs by index belong to `nodes`.

    `is_leaderless`: it answers 503 to all calls of leases. `is_known`: it names its fleet.
    """

    def __init__(self, server: ServerProcess, node: str, nodes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(answering(self._answer))
        self.server, self.node, self.nodes = server, node, nodes
        self.is_leaderless = False
        self.is_known = True
        self.pool_id: str | None = None

    async def _answer(self, seen: Seen) -> tuple[int, Any]:
        is_fleet = seen.path.startswith("/fleet/")
        target = seen.target.removeprefix("/fleet")
        path = target.partition("?")[0]
        if self.is_leaderless and path.startswith(("/leases", "/bookings")):
            return NOBODY_LEADS
        status, found = await self._pass_on(seen, target)
        self.pool_id = self.pool_id or (await self._pass_on(seen, "/pool", "GET"))[1]["pool_id"]
        self._place(found)
        if path in {"/pool", "/health"} and status == 200:
            fleet_id = self.pool_id if self.is_known else None
            found["fleet"] = {"id": fleet_id, "role": "follower", "epoch": 1, "leader": "a", "leader_url": None}
        if path == "/pool" and status == 200:
            found["server_id"] = f"{found['server_id']}-{self.node}"
            found["node"] = None if is_fleet else self.node
            if not is_fleet:
                found["gpus"] = [gpu for gpu in found["gpus"] if gpu["node"] == self.node]
        return status, found

    async def _pass_on(self, seen: Seen, target: str, method: str | None = None) -> tuple[int, Any]:
        body = b"" if method else seen.body
        if method is None and seen.method == "PUT":
            # A caller on another machine: its lease has a TTL.
            body = json.dumps({name: value for name, value in seen.json.items() if not name.startswith("pid")}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        try:
            head = f"{method or seen.method} {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            first, _, answer = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.transport.abort()
        return int(first.split(b" ")[1]), json.loads(answer)

    def _place(self, found: Any) -> None:
        """Say of each GPU of an answer which node has it."""
        if isinstance(found, dict):
            if isinstance(found.get("gpu_id"), int) and "node" in found:
                found["node"] = next(node for node, ids in self.nodes.items() if found["gpu_id"] in ids)
            for value in found.values():
                self._place(value)
        elif isinstance(found, list):
            for value in found:
                self._place(value)
