"""A thousand tasks on eight GPUs, while workers and their guards are killed at random."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from concurrent.futures import as_completed
from contextlib import suppress
from pathlib import Path

import pytest

from gpu_worker_pool import GPUExecutor, WorkerLostError
from gpu_worker_pool.host.guard import descendants
from gpu_worker_pool.testing import ServerProcess
from tests.server.leasing import OFTEN

from . import work

TASKS = 1000
# After so many tasks, a process is killed.
KILL_EVERY = 60
GUARD, WORKER = "host/guard.py", "executor/worker.py"


def processes(program: str) -> list[int]:
    """Those below this process that run this program."""
    found = []
    for pid in descendants(os.getpid()):
        with suppress(OSError):
            if program.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def kill_one(chance: random.Random) -> bool:
    victims = processes(GUARD if chance.random() < 0.2 else WORKER)
    with suppress(ProcessLookupError):
        os.kill(chance.choice(victims), signal.SIGKILL) if victims else None
    return bool(victims)


@pytest.mark.parametrize("retries", [0, 5])
def test_every_task_has_its_result_once_or_an_exception_and_no_lease_is_left(
    tmp_path: Path, retries: int, record_property: Callable[[str, object], None]
) -> None:
    chance, begun = random.Random(retries), tmp_path / "begun"
    outcomes: Counter[str] = Counter()
    kills = 0
    with ServerProcess({**OFTEN, "SIMULATED_GPUS": "8", "GPU_POOL_DURABILITY": "normal"}) as server:
        with GPUExecutor(8, retries=retries, service_endpoint=server.url, grace_s=0.5) as ex:
            tasks = {ex.submit(work.note_and_square, str(begun), number): number for number in range(TASKS)}
            for done, future in enumerate(as_completed(tasks)):
                if (error := future.exception()) is None:
                    assert future.result() == tasks[future] ** 2
                else:
                    assert isinstance(error, WorkerLostError)
                outcomes["lost" if error else "done"] += 1
                if done % KILL_EVERY == 0:
                    kills += kill_one(chance)
        pool = server.json("/pool")

    assert outcomes.total() == TASKS
    assert [lease for lease in pool["leases"] if lease["state"] == "active"] == pool["queue"] == []
    assert processes(WORKER) == processes(GUARD) == []
    times = Counter(begun.read_text(encoding="ascii").split())
    assert max(times.values()) <= 1 + retries
    assert outcomes["lost"] <= kills
    if retries:
        assert outcomes["lost"] == 0
    # Nothing is begun twice without a kill, and what has a result was begun.
    assert sum(times.values()) - len(times) <= kills
    assert outcomes["done"] <= len(times)
    record_property(
        "measured", f"retries={retries}: {kills} processes killed, {outcomes['lost']} of {TASKS} tasks lost"
    )
