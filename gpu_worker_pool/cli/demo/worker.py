"""The workers of the demo, each in a process of its own: ask for a GPU, hold it for a moment, release it, and again.

    python -m gpu_worker_pool.cli.demo.worker 5 '{"names": ["w01", "w02"], ...}'

loads the client once and forks a process for each worker: a dozen starts of Python would take longer than the demo. It
ends when all workers have ended; when it is killed, they are killed too. Each worker reads its pace from the pipe 5, and asks until standard
input ends. Standard output gets its lines, as gpu_worker_pool/history_check.py reads them. While a worker holds a GPU it
also locks a file named after the GPU, the witness: the kernel then proves that no other worker uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

# A client loads this when it starts; loaded here once for all workers.
import gpu_worker_pool.client.started_client  # noqa: F401
from gpu_worker_pool.client.events import ClientEvent
from gpu_worker_pool.client.pool_client import Assignment, GPUWorkerPoolClient
from gpu_worker_pool.errors import PoolError
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.host.guard import die_with

PATIENCE_S: Final = 120.0  # longer than any demo
SHORTEST_HOLD_S: Final = 0.4
LONGEST_HOLD_S: Final = 1.8
LONGEST_REST_S: Final = 0.3
LAST_HOLD_S: Final = 0.3  # once the demo is to end
CHEATING_S: Final = 0.9  # long enough for the next worker to get the GPU, also on a busy machine
PACE_BYTES: Final = 8
LONGEST_REASON: Final = 1000  # so that a line fits into one write


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings of all workers. The cheat releases its GPU half-way through each turn, and goes on using it."""

    names: list[str]
    endpoint: str
    folder: str
    seed: int
    cheat: str | None
    parent: int


class Worker:
    def __init__(self, settings: WorkerSettings, name: str) -> None:
        self._settings, self._name = settings, name
        self._random = random.Random(f"{settings.seed}/{name}")  # noqa: S311 - no secret
        self._turn, self._asked_at, self._pace = 0, 0.0, 1.0
        self._finish = asyncio.Event()

    def work(self, go: int) -> None:
        self._write_line("ready", pid=os.getpid())
        pace = os.read(go, PACE_BYTES)
        if not pace:
            return  # the demo has ended
        self._pace = float(pace)
        try:
            asyncio.run(self._take_turns())
        except PoolError as error:
            self._write_line("could_not_go_on", reason=str(error)[:LONGEST_REASON])
        else:
            self._write_line("exits")

    async def _take_turns(self) -> None:
        loop = asyncio.get_running_loop()

        def finish() -> None:
            loop.remove_reader(sys.stdin)
            self._finish.set()

        loop.add_reader(sys.stdin, finish)
        one, several = self._settings.endpoint, "," in self._settings.endpoint
        async with GPUWorkerPoolClient(
            service_endpoint=None if several else one,
            service_endpoints=one if several else None,
            polling_interval=5.0,
            endpoint_health_check_interval=0.25,  # the server is down for a second only
            on_event=self._on_event,
        ) as client:
            await self._rest(0.5)
            while not self._finish.is_set():
                await self._take_turn(client)
                await self._rest(LONGEST_REST_S)

    async def _take_turn(self, client: GPUWorkerPoolClient) -> None:
        self._turn += 1
        self._asked_at = boot_time()
        is_cheat = self._name == self._settings.cheat
        # The cheat is served first: then other workers wait for what it releases.
        priority = 1 if is_cheat else 0
        self._write_line("asks", gpus=1, memory_mb=None, priority=priority)
        assignment = await client.request_gpu(PATIENCE_S, priority=priority, labels={"demo": self._name})
        hold_s = self._pace * self._random.uniform(SHORTEST_HOLD_S, LONGEST_HOLD_S)
        gpus = {"uuids": assignment.uuids, "gpu_ids": assignment.gpu_ids}
        self._write_line("took", id=assignment.lease_id, fence=assignment.fence, for_s=round(hold_s, 2), **gpus)
        with self._witness(assignment.uuids[0]):
            await self._hold(assignment, hold_s / 2 if is_cheat else hold_s)
            if is_cheat:
                await client.release_gpu(assignment)
                await asyncio.sleep(self._pace * CHEATING_S)
            left_at = boot_time()
        self._write_line("left", left_at=left_at)
        if assignment.is_lost:
            self._write_line("lost", reason=getattr(assignment.lost, "reason", None) or "no heartbeat got through")
        elif not is_cheat:
            await client.release_gpu(assignment)

    async def _hold(self, assignment: Assignment, hold_s: float) -> None:
        """Hold the GPU: for a shorter time once the demo ends, and never longer than the lease lasts."""
        assert assignment.lost is not None  # noqa: S101 - the client sets it; for mypy
        lost = asyncio.ensure_future(assignment.lost.wait())
        finish = asyncio.ensure_future(self._finish.wait())
        try:
            await asyncio.wait([lost, finish], timeout=hold_s, return_when=asyncio.FIRST_COMPLETED)
            if finish.done() and not lost.done():
                await asyncio.wait([lost], timeout=min(hold_s, LAST_HOLD_S * self._pace))
        finally:
            lost.cancel()
            finish.cancel()

    async def _rest(self, longest_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._random.uniform(0.0, longest_s)):
                await self._finish.wait()

    @contextlib.contextmanager
    def _witness(self, uuid: str) -> Iterator[None]:
        """Lock the GPU's file. A lock that another worker has is recorded, not waited for."""
        with Path(self._settings.folder, f"{uuid}.witness").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._write_line("witness_busy", uuid=uuid)
            yield

    def _on_event(self, event: ClientEvent) -> None:
        if event.kind == "waiting":
            answer = {"call": "PUT", "status": 202, "state": "queued", "sent": self._asked_at, "uuids": []}
            self._write_line("answered", id=event.lease_id, **answer)

    def _write_line(self, what: str, **facts: Any) -> None:
        """Write one line in a single call: it is complete or missing, however the process ends."""
        about = {"lease": f"{self._name}-{self._turn}", "turn": self._turn}
        line = {"what": what, "who": self._name, "at": boot_time(), **about, **facts}
        with contextlib.suppress(BrokenPipeError):  # the demo has ended; this process will, too
            os.write(sys.stdout.fileno(), json.dumps(line).encode() + b"\n")


def main(go: int, settings: WorkerSettings) -> int:
    die_with(settings.parent)
    parent = os.getpid()
    for name in settings.names:
        if os.fork() == 0:
            die_with(parent)
            Worker(settings, name).work(go)
            return 0
    for _ in settings.names:
        os.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), WorkerSettings(**json.loads(sys.argv[2]))))
