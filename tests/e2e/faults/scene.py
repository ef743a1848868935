"""What all faults share: the plan of a run, its history, the server, and the bad network before it."""

from __future__ import annotations

import asyncio
import json
import random
import resource
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_worker_pool.testing import START_S, ServerDidNotStartError, ServerProcess
from tests.e2e.proxy import Proxy
from tests.e2e.worker import NoAnswer, Orders, now, parse

SHARE_MB = 20_000.0
NODE = "nemesis"
Fault = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Plan:
    """How long, and how many. Less than a second lies between two faults."""

    seed: int
    chaos_s: float = 20.0
    calm_s: float = 7.5
    gpus: int = 4
    badness: float = 0.2
    # How long the server is away once in a run: several TTLs of the holders that have to live with it.
    outage_s: float = 5.0
    shares: int = 1000

    def roles(self) -> list[Orders]:
        """One of each, without name, port and folder: local and remote, wide and shared, in a hurry and important."""
        base = Orders("", 0, "", seed=self.seed, longest_hold_s=1.2, shortest_hold_s=0.02, ttl_s=4.0)
        # Those from elsewhere: some with a short TTL, and some whose heartbeats are far apart, as they are by default.
        remote = replace(base, is_local=False, ttl_s=2.4, longest_hold_s=1.6)
        slow = replace(base, is_local=False, ttl_s=12.0, longest_wait_s=4.0, shortest_hold_s=2.2, longest_hold_s=3.6)
        return [
            *[base] * 4,
            replace(base, longest_hold_s=3.0),
            replace(base, priority=5),
            replace(base, gpus=2),
            replace(remote, gpus=2),
            remote,
            *[slow] * 2,
            *[replace(base, memory_mb=SHARE_MB)] * 2,
            replace(remote, memory_mb=SHARE_MB, priority=5),
        ]

    def heartbeat_role(self, port: int) -> Orders:
        """A remote holder of a small share, straight at the server. It gives up after four seconds without an answer."""
        base = Orders("", port, "", seed=self.seed, priority=9, ttl_s=6.0, is_local=False, memory_mb=100.0)
        return replace(base, shortest_hold_s=3600.0, longest_hold_s=3600.0)

    def outage_roles(self) -> list[Orders]:
        """A local and a remote holder that keep what they have until they are told to end."""
        base = Orders("", 0, "", seed=self.seed, priority=9, ttl_s=1.5, shortest_hold_s=3600.0, longest_hold_s=3600.0)
        return [base, replace(base, is_local=False)]


class Recorder:
    """The nemesis' own history."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "nemesis.history").open("a", encoding="utf-8")
        self.counts: Counter[str] = Counter()

    def say(self, what: str, **facts: object) -> None:
        self.counts[what] += 1
        self._file.write(json.dumps({"what": what, "who": "nemesis", "at": now(), **facts}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Server(ServerProcess):
    """The server, to be killed and started again at the same port and on the same state."""

    def __init__(self, folder: Path, gpus: int) -> None:
        self.outsiders = folder / "outsiders.json"
        self.shared_settings = {"SIMULATED_GPUS": str(gpus), "REFRESH_INTERVAL": "0.2", "GPU_POOL_NODE": NODE}
        super().__init__({**self.shared_settings, "SIMULATED_OUTSIDERS": str(self.outsiders)}, folder=folder)
        self.scope = self.env["GPU_POOL_LOCK_SCOPE"]
        self.usual = self.env
        self.is_well = False
        self.was_unwell_at = 0.0
        self.failpoint: str | None = None
        # The process that has come up, and has taken its GPUs.
        self.ready_pid = -1

    def unwell(self) -> None:
        self.is_well = False
        self.was_unwell_at = now()

    def recover(self) -> None:
        """It is well from now on; those who look at it allow it a second."""
        self.unwell()
        self.is_well = True

    async def come_up(self, failpoint: str | None = None) -> bool:
        """Whether it came up; with a failpoint it may die on the way, and anybody may kill it."""
        self.env = {**self.usual, **({"GPU_POOL_FAILPOINT": failpoint} if failpoint else {})}
        gives_up_at = now() + START_S
        self.launch()
        pid = self.pid
        with suppress(ServerDidNotStartError):
            await asyncio.to_thread(self.wait_until_ready)
            self.ready_pid = pid
        assert now() < gives_up_at, "the server did not start, and did not end either"
        self.failpoint, self.is_well = failpoint, self.is_running
        return self.is_well

    async def until_well(self) -> None:
        while not (self.is_well and self.is_running):  # noqa: ASYNC110 - a process tells nobody
            await asyncio.sleep(0.02)

    @property
    def authority(self) -> int | None:
        """The pid of the process that has the GPUs, stopped or not; None while none is certain to have them."""
        return self.pid if self.is_running and self.ready_pid == self.pid else None

    def kill(self) -> None:
        self.unwell()
        super().kill()

    def limit_files(self, size: int) -> None:
        hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (size, hard))

    async def look_up(self, path: str, patience_s: float = 3.0) -> tuple[int, dict[str, Any]]:
        """Straight, not through the bad network."""
        try:
            async with asyncio.timeout(patience_s):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                try:
                    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
                    answer = parse(await reader.read())
                finally:
                    writer.transport.abort()
        except (OSError, TimeoutError) as error:
            raise NoAnswer(repr(error)) from error
        if answer is None:
            raise NoAnswer("cut off")
        return answer


class Scene:
    """One run, as its faults see it."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.random = random.Random(plan.seed)
        self.recorder = Recorder(folder)
        self.server = Server(folder, plan.gpus)
        self.proxy = Proxy(self.server.port, plan.seed)
        self.is_healing = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def pause(self, seconds: float) -> None:
        """So long, or until everything is healed."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.is_healing.wait(), seconds)
