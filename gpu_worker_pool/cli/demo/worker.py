"""The workers of the demo, each in a process of its own: ask for a GPU, hold it for a moment, release it, and again.

    python -m gpu_worker_pool.cli.demo.worker '[["w01", "w02"], PARENT, ["http://localhost:8000"], FOLDER]'

loads the client once and forks a process for each worker. The workers ask until standard input ends, and are killed with
the process that forked them. Each line on standard output is what one worker saw. While a worker holds a GPU it also
locks a file named after the GPU: the kernel then proves that no other worker uses it.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import sys
import time
from pathlib import Path
from typing import Any, Final

# A client loads these when it starts; loaded here once for all workers.
import gpu_worker_pool.client.loop_thread
import gpu_worker_pool.client.started_client  # noqa: F401
from gpu_worker_pool.client.blocking import GPUWorkerPool
from gpu_worker_pool.client.events import ClientEvent
from gpu_worker_pool.errors import PoolError
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.host.guard import die_with

PATIENCE_S: Final = 120.0  # longer than any demo
HOLD_S: Final = (0.4, 1.6)
REST_S: Final = (0.0, 0.3)
LONGEST_REASON: Final = 1000  # so that a line fits into one write


class DemoWorker:
    def __init__(self, name: str, endpoints: list[str], folder: str) -> None:
        self._name, self._endpoints, self._folder = name, endpoints, Path(folder)
        self._random = random.Random()  # noqa: S311 - no secret
        self._turn = 0

    def work(self) -> None:
        urls = self._endpoints
        where: dict[str, Any] = {"service_endpoint": urls[0]} if len(urls) == 1 else {"service_endpoints": urls}
        # The server is down for a second only, so its health is checked often.
        options: dict[str, Any] = {"endpoint_health_check_interval": 0.25, "on_event": self._on_event}
        try:
            with GPUWorkerPool(**where, **options) as pool:
                self._write("ready", pid=os.getpid())
                while not select.select([sys.stdin], [], [], self._random.uniform(*REST_S))[0]:
                    self._take_turn(pool)
        except PoolError as error:
            self._write("failed", reason=str(error)[:LONGEST_REASON])
        else:
            self._write("exits")

    def _take_turn(self, pool: GPUWorkerPool) -> None:
        self._turn += 1
        self._write("asks")
        assignment = pool.request_gpu(PATIENCE_S, labels={"demo": self._name})
        uuid, hold_s = assignment.uuids[0], self._random.uniform(*HOLD_S)
        facts = {"id": assignment.lease_id, "fence": assignment.fence, "uuid": uuid}
        self._write("took", **facts, gpu=str(assignment.gpu_ids[0]), for_s=round(hold_s, 2))
        with (self._folder / f"{uuid}.lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._write("lock_taken", uuid=uuid)
            time.sleep(hold_s)
            left_at = boot_time()
        self._write("left", left_at=left_at)
        if assignment.is_lost:
            self._write("failed", reason=f"its lease was lost: {getattr(assignment.lost, 'reason', None)}")
        else:
            pool.release_gpu(assignment)

    def _on_event(self, event: ClientEvent) -> None:
        if event.kind == "waiting":
            self._write("waits", id=event.lease_id)

    def _write(self, what: str, **facts: Any) -> None:
        """Write one line in a single call: it is complete or missing, however the process ends."""
        line = {"what": what, "who": self._name, "turn": self._turn, "at": boot_time(), **facts}
        os.write(sys.stdout.fileno(), json.dumps(line).encode() + b"\n")


def main(names: list[str], parent: int, endpoints: list[str], folder: str) -> None:
    die_with(parent)
    parent = os.getpid()
    for name in names:
        if os.fork() == 0:
            die_with(parent)
            DemoWorker(name, endpoints, folder).work()
            return
    for _ in names:
        os.wait()


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
