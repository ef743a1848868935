"""Boxes of a fleet as real processes, each with simulated GPUs of its own, and a real PostgreSQL behind silent proxies."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from gpu_worker_pool.testing import ServerProcess
from tests.e2e.faults.workers import PYTHON, WORKER
from tests.e2e.worker import NoAnswer, Orders, call, now
from tests.ledger.postgres.server import PostgresServer
from tests.server.leasing import pause_s

from .silent_proxy import SilentProxy

GPUS = 2
# Only so that a test ends at all where something is broken.
LIMIT_S = 60.0
KEY = "a-key-that-is-long-enough"
# Longer than a take-over: a holder renews at a third, and gives up at two thirds.
TTL_S = 30.0


class Box(ServerProcess):
    """A box of the fleet; its node has the name of its folder."""

    def __init__(self, fleet: str, folder: Path, **settings: str) -> None:
        super().__init__(
            {
                "SIMULATED_GPUS": str(GPUS),
                "GPU_POOL_NODE": folder.name,
                "GPU_POOL_FLEET": fleet,
                # One that leads alone makes its own.
                **({} if fleet in {"", "lead"} else {"GPU_POOL_FLEET_KEY": KEY}),
                "REFRESH_INTERVAL": "0.5",
                "ACCESS_LOG": "false",
                **settings,
            },
            folder=folder,
        )
        self.node = folder.name

    def send(self, what: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(what)

    def call(self, method: str, path: str, body: object = None, timeout_s: float = LIMIT_S) -> tuple[int, Any]:
        return call(self.port, method, path, body, timeout_s)

    def health(self) -> dict[str, Any]:
        """Its health; empty where it does not answer."""
        try:
            status, health = self.call("GET", "/health", timeout_s=5.0)
        except NoAnswer:
            return {}
        return health if status in {200, 503} else {}

    @property
    def leads(self) -> bool:
        health = self.health()
        return bool(health.get("can_grant")) and health["fleet"]["role"] == "leader"

    @property
    def epoch(self) -> int:
        return int(self.health()["fleet"]["epoch"] or 0)


class Candidate(Box):
    """A box that can lead. It reaches the database through a network of its own."""

    def __init__(self, database: PostgresServer, name: str, folder: Path, **settings: str) -> None:
        self.proxy = SilentProxy(database.url(name))
        super().__init__(self.proxy.url, folder, **settings)

    def close(self) -> None:
        super().close()
        self.proxy.close()


def until(what: Any, why: str) -> Any:
    """The first true answer. Processes tell nobody when they are so far."""
    began = now()
    while not (answer := what()):
        assert now() - began < LIMIT_S, f"it did not happen within {LIMIT_S} s: {why}"
        time.sleep(pause_s(now() - began))
    return answer


class Fleet:
    """Candidates on one database, and workers that ask whichever of them leads."""

    def __init__(self, database: PostgresServer, name: str, folder: Path, size: int = 3, **settings: str) -> None:
        self.database = database
        self.name = name
        self.folder = folder
        self.candidates = [
            Candidate(database, name, folder / f"candidate{number}", **settings) for number in range(size)
        ]
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        # By the first worker of a role: the one that has it now.
        self.roles: dict[str, tuple[str, Orders]] = {}
        self._numbers = count()

    def start(self) -> None:
        for candidate in self.candidates:
            candidate.launch()
        for candidate in self.candidates:
            candidate.wait_until_ready()

    def let_lead(self, candidate: Candidate, **settings: str) -> None:
        """Start a candidate, with more settings, and let it come to lead. The others follow."""
        usual = candidate.env
        candidate.env = {**usual, **settings}
        others = [each for each in self.candidates if each is not candidate]
        for other in others:
            other.stop()
        candidate.start()
        candidate.env = usual
        self.leader([candidate])
        for other in others:
            other.start()

    def end_leadership(self) -> None:
        """As if its time were over, so that a test need not wait for that."""
        self.database.execute("UPDATE gpu_pool.leader SET expires_at = 'epoch'; NOTIFY gpu_pool, 'pool'", self.name)

    def leader(self, among: Collection[Candidate] | None = None) -> Candidate:
        """The one that leads, or comes to lead."""

        def leading() -> Candidate | None:
            return next((each for each in among or self.candidates if each.is_running and each.leads), None)

        found: Candidate = until(leading, "a candidate leads")
        return found

    def await_boxes(self, number: int | None = None) -> Candidate:
        """The leader, once so many boxes have joined it, all of them by default, and their GPUs are known."""
        wanted = len([each for each in self.candidates if each.is_running]) if number is None else number

        def has_joined() -> Candidate | None:
            leader = self.leader()
            status, pool = leader.call("GET", "/fleet/pool")
            known = {gpu["node"] for gpu in pool["gpus"] if gpu["state"] != "unknown"} if status == 200 else set()
            return leader if len(known) >= wanted else None

        found: Candidate = until(has_joined, f"{wanted} boxes have joined the leader")
        return found

    def others(self, candidate: Candidate) -> list[Candidate]:
        return [each for each in self.candidates if each is not candidate and each.is_running]

    def employ(self, *roles: Orders) -> None:
        """Start a worker for each role."""
        for orders in roles:
            name, _ = started = self._start_worker(orders)
            self.roles[name] = started

    def _start_worker(self, role: Orders) -> tuple[str, Orders]:
        port, *other_ports = (candidate.port for candidate in self.candidates)
        name = f"w{next(self._numbers)}"
        ports = tuple(other_ports)
        orders = replace(role, name=name, port=port, other_ports=ports, folder=str(self.folder), prefix="/fleet")
        command = (*PYTHON, str(WORKER), orders.encoded())
        self.workers[name] = subprocess.Popen(command, env={}, stdin=subprocess.DEVNULL)
        return name, orders

    def kill_worker(self, role: str) -> None:
        """Kill the worker that has this role now, which may hold a GPU, and start another one in its place."""
        name, orders = self.roles[role]
        worker = self.workers.pop(name)
        killed_at = now()
        worker.kill()
        worker.wait()
        line = {"what": "killed", "who": "nemesis", "at": killed_at, "worker": name, "reaped_at": now()}
        with (self.folder / "nemesis.history").open("a") as history:
            history.write(json.dumps(line) + "\n")
        self.roles[role] = self._start_worker(orders)

    def end_workers(self) -> None:
        for worker in self.workers.values():
            worker.terminate()
        for worker in self.workers.values():
            assert worker.wait(LIMIT_S) == 0

    def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()
            worker.wait()
        for candidate in self.candidates:
            candidate.close()


@contextmanager
def fleet_of(database: PostgresServer, name: str, folder: Path, size: int = 3, **settings: str) -> Iterator[Fleet]:
    fleet = Fleet(database, name, folder, size, **settings)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.close()


def crew() -> list[Orders]:
    """Local and remote holders, for one GPU and for both, more than there are GPUs."""
    base = Orders("", 0, "", shortest_hold_s=0.05, longest_hold_s=0.5, longest_wait_s=1.0, ttl_s=TTL_S)
    remote = replace(base, is_local=False)
    return [replace(role, seed=seed) for seed, role in enumerate((base, base, remote, remote, replace(base, gpus=2)))]
