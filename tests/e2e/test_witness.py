"""However many processes ask for however many GPUs at once, no GPU is ever held twice.

The witness is independent of the pool: each holder takes an exclusive lock on a file named after the GPU, at once or not at
all. Nobody is killed or stopped here, so a lock that cannot be had is a GPU that two were given.
"""

from __future__ import annotations

import fcntl
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.e2e.faults.workers import PYTHON, WORKER
from tests.e2e.history_check import check
from tests.e2e.run_history import LeaseRecord, RunHistory, read_history
from tests.e2e.worker import Orders, call

LIMIT_S = 60.0
WAITERS = 50


def serving(gpus: int) -> ServerProcess:
    return ServerProcess({"SIMULATED_GPUS": str(gpus), "ACCESS_LOG": "false"})


def work(orders: Orders) -> RunHistory:
    """Let them work until they are done, and read what they saw."""
    subprocess.run([*PYTHON, str(WORKER), orders.encoded()], check=True, timeout=LIMIT_S, env={})
    return read_history(Path(orders.folder))


@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_no_gpu_is_held_twice(gpus: int, tmp_path: Path) -> None:
    with serving(gpus) as server:
        for crowd, rounds in ((2, 5), (10, 3), (50, 1)):
            folder = tmp_path / str(crowd)
            folder.mkdir()
            orders = Orders("w", server.port, str(folder), longest_hold_s=0.01, crowd=crowd, rounds=rounds, seed=crowd)

            history = work(orders)

            assert not [line for line in history.lines if line["what"] == "witness_busy"]
            assert check(history) == []
            assert sum(line["what"] == "witness" for line in history.lines) == crowd * rounds
            assert len({lease.fence for lease in history.tenures}) == crowd * rounds


def test_nobody_is_on_a_gpu_beside_one_who_has_several(tmp_path: Path) -> None:
    with serving(4) as server:
        orders = Orders("w", server.port, str(tmp_path), longest_hold_s=0.01, gpus=3, crowd=10, rounds=2)

        history = work(orders)

    assert not [line for line in history.lines if line["what"] == "witness_busy"]
    assert check(history) == []
    assert sum(line["what"] == "witness" for line in history.lines) == 10 * 2 * 3


def test_the_witness_can_testify(tmp_path: Path) -> None:
    """A lock that is taken already is written down, and the checker says so."""
    with serving(1) as server:
        uuid = server.json("/pool")["gpus"][0]["uuid"]
        orders = Orders("w", server.port, str(tmp_path), crowd=1, rounds=1)
        with (tmp_path / f"{uuid}.witness").open("a") as witness:
            fcntl.flock(witness, fcntl.LOCK_EX)

            history = work(orders)

    assert [line for line in history.lines if line["what"] == "witness_busy"]
    assert "lock" in {violation.kind for violation in check(history)}


def test_sharers_share(tmp_path: Path) -> None:
    with serving(1) as server:
        orders = Orders("w", server.port, str(tmp_path), shortest_hold_s=0.3, longest_hold_s=0.4, crowd=6, rounds=1)

        history = work(replace(orders, memory_mb=20_000.0))

    assert check(history) == []
    overlapping = [
        lease
        for lease in history.tenures
        if sum(_meet(lease, other) for other in history.tenures) > 1  # itself is one
    ]
    assert overlapping


def _meet(one: LeaseRecord, other: LeaseRecord) -> bool:
    return one.took_at < other.ended_at and other.took_at < one.ended_at


def test_fifty_waiters_are_served_in_the_order_they_asked() -> None:
    served: list[tuple[int, int]] = []

    with serving(1) as server, ThreadPoolExecutor(WAITERS) as threads:

        def wait_for_it(number: int) -> None:
            """Wait, say so while the GPU is held, and release it."""
            path = f"/leases/waiter{number}"
            answer = {"state": "queued"}
            while answer["state"] == "queued":
                _, answer = call(server.port, "GET", f"{path}?wait_s=25", None, LIMIT_S)
            served.append((number, int(answer["fence"])))
            call(server.port, "DELETE", path, None, LIMIT_S)

        assert call(server.port, "PUT", "/leases/first", {"ttl_s": 60.0}, LIMIT_S)[0] == 201
        for number in range(WAITERS):
            status, answer = call(server.port, "PUT", f"/leases/waiter{number}", {"ttl_s": 60.0}, LIMIT_S)
            assert (status, answer["position"]) == (202, number + 1)
        waits = [threads.submit(wait_for_it, number) for number in range(WAITERS)]
        assert call(server.port, "DELETE", "/leases/first", None, LIMIT_S)[0] == 200
        for each in waits:
            each.result()

    assert [number for number, _ in served] == list(range(WAITERS))
    fences = [fence for _, fence in served]
    assert fences == sorted(set(fences))
