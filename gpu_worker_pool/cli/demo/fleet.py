"""The demo of a fleet: three boxes on a real PostgreSQL, whose leader and whose database are killed on the way."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import secrets
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from gpu_worker_pool.cli.failure import Failure
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.run_history import Line
from gpu_worker_pool.testing import Answer, ServerProcess

from .demo import CALL_S, FRAME_S, SERVER_SETTINGS, STOPPING_S, Demo
from .folder import DemoFolder
from .postgres import PostgresDidNotStartError, PostgresProcess
from .summary import Record

BOXES: Final = 3
CANDIDATES: Final = 2
_POOL: Final = "demo"
# The database is away for this part of the time.
_DATABASE_AWAY: Final = 0.2
# The next fault comes no sooner than this after the last one.
_CALM_S: Final = 2.0


class FleetDemo(Demo):
    """One run. Each worker may ask any box, and is given a GPU of any box."""

    _scope = "/fleet"
    _starting_s = 40.0
    _patience_s = 20.0
    _back = {"leader": "another box leads", "database": "the database is back, and a box leads"}  # noqa: RUF012

    def _set_up(self, folder: DemoFolder) -> str:
        self._announce(f"starting PostgreSQL, {BOXES} boxes ({CANDIDATES} can lead) and {self._plan.workers} workers")
        folder.path.chmod(0o711)  # PostgreSQL may have to run as another user
        try:
            self._database = PostgresProcess(folder=folder.path)
            self._database.create_database(_POOL)
        except (PostgresDidNotStartError, OSError, subprocess.SubprocessError) as error:
            raise Failure(f"the demo of a fleet needs a PostgreSQL: {error}", 1) from None
        gpus = str(self._plan.gpus or 2)
        shared = {**SERVER_SETTINGS, "SIMULATED_GPUS": gpus, "GPU_POOL_FLEET_KEY": secrets.token_hex(16)}
        names = [f"box{number}" for number in range(1, BOXES + 1)]
        self._boxes = [ServerProcess({**shared, "GPU_POOL_NODE": name}, folder=folder.path / name) for name in names]
        listed = ",".join(box.url for box in self._boxes[:CANDIDATES])
        for number, box in enumerate(self._boxes):
            box.env["GPU_POOL_FLEET"] = self._database.url(_POOL) if number < CANDIDATES else listed
        return ",".join(box.url for box in self._boxes)

    def _gpu_name(self, gpu: dict[str, Any]) -> str:
        return f"{gpu['node']}:{gpu['gpu_id']}"

    async def _start_servers(self) -> dict[str, Any]:
        for box in self._boxes:
            box.launch()
        for box in self._boxes:
            await asyncio.to_thread(box.wait_until_ready)

        async def all_gpus() -> dict[str, Any] | None:
            pool = await self._pool()
            gpus = [gpu for gpu in pool["gpus"] if gpu["state"] != "unknown"] if pool else []
            return {**pool, "gpus": gpus, "source": "simulated"} if pool and len(gpus) == self._gpus else None

        pool: dict[str, Any] = await self._first(all_gpus)
        self._gpu_names = {gpu["uuid"]: self._gpu_name(gpu) for gpu in pool["gpus"]}
        return pool

    def _add_line(self, line: Line) -> None:
        # The client names GPUs by its endpoints; the picture names them by their boxes.
        if "gpu_ids" in line:
            line = {**line, "gpu_ids": [self._gpu_names[uuid] for uuid in line["uuids"]]}
        super()._add_line(line)

    @property
    def _gpus(self) -> int:
        return BOXES * (self._plan.gpus or 2)

    async def _kill_worker(self, ends_at: float) -> None:
        # The boxes and the clients of a fleet need longer until many GPUs are held.
        await super()._kill_worker(max(ends_at, boot_time() + self._patience_s))

    async def _break(self, ends_at: float) -> None:
        """Kill the leader, and then the database; both come back."""
        await self._await_holders(ends_at)
        leader = await self._first(self._leader)
        killed_at, pid, number = boot_time(), leader.pid, self._boxes.index(leader) + 1
        leader.kill()
        self._note_away(killed_at, "leader", f"box{number} (pid {pid}), which leads the fleet")
        await self._first(self._leader)
        await self._note_back(killed_at, "leader")
        leader.launch()
        await asyncio.to_thread(leader.wait_until_ready)
        self._announce(f"box{number} is back, and follows", "green")
        await asyncio.sleep(_CALM_S)
        await self._await_holders(ends_at)
        killed_at = boot_time()
        await asyncio.to_thread(self._database.kill)
        self._note_away(killed_at, "database", "PostgreSQL: no box can lead")
        await asyncio.sleep(_DATABASE_AWAY * self._plan.seconds)
        await asyncio.to_thread(self._database.start)
        await self._first(self._leader)
        await self._note_back(killed_at, "database")

    async def _leader(self) -> ServerProcess | None:
        """The box that leads and can grant."""
        for box in self._boxes:
            answer = await self._ask_box(box, "/health") if box.is_running else None
            health = answer.json if answer is not None else {}
            if health.get("can_grant") and health["fleet"]["role"] == "leader":
                return box
        return None

    async def _first(self, ask: Callable[[], Any]) -> Any:
        """The first true answer. The demo's own limit ends the wait."""
        while True:
            if answer := await ask():
                return answer
            await asyncio.sleep(FRAME_S / 2)

    async def _ask(self, path: str) -> Answer | None:
        """Ask the boxes in turn, until one of them can pass the call on to the leader."""
        answer = None
        for box in self._boxes:
            answer = (await self._ask_box(box, path) if box.is_running else None) or answer
            if answer is not None and answer.status < 500:
                return answer
        return answer

    async def _ask_box(self, box: ServerProcess, path: str) -> Answer | None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return await asyncio.wait_for(asyncio.to_thread(box.ask, path), CALL_S)
        return None

    async def _stop(self) -> None:
        rows = "SELECT body FROM gpu_pool.event ORDER BY position"
        bodies = await asyncio.to_thread(self._database.execute, rows, _POOL)
        self._record("journal", events=[json.loads(body) for body in bodies.splitlines()])
        await asyncio.gather(*(asyncio.to_thread(box.stop, STOPPING_S) for box in self._boxes))

    def _close(self) -> None:
        for box in self._boxes:
            box.close()
        self._database.remove()

    async def run(self) -> Record:
        return replace(await super().run(), boxes=BOXES)
