"""Clients of the contenders, which take one of several GPUs and release it in the same two calls.

They run in processes of their own, some of them with the interpreter of the peers, so each imports its library when it
is made. Where a library has no way to wait for *one of several*, the client tries each in turn, from a random one on.
Then it pauses as long as the library itself does by default between two tries.
"""

from __future__ import annotations

import http.client
import importlib
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from benchmarks.contenders.desk import Desk

WAIT_S = 60.0
REDIS_SLEEP_S = 0.1
FILELOCK_SLEEP_S = 0.05
# A client of the statistics reads them often, and takes a GPU that is hardly used.
LOOK_S = 0.1
FREE_PERCENT = 10.0

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Handle:
    """A GPU that was taken: since when, by which process, and what is needed to give it back."""

    gpu: int
    at: float
    pid: int
    what: Any


class Taker(Protocol):
    """One client, used by one thread of the process that made it."""

    def take(self) -> Handle:
        """Wait until it holds a GPU."""
        ...

    def release(self, handle: Handle) -> None: ...


class PoolTaker:
    """This project's blocking client. The clients of the others block too.

    With `ports` it asks one of the boxes of a fleet for any GPU of the fleet, and the next process asks the next box.
    """

    def __init__(self, settings: Settings) -> None:
        ports: list[int] = settings.get("ports") or [settings["port"]]
        scope = {"scope": "fleet"} if "ports" in settings else {}
        url = f"http://127.0.0.1:{ports[os.getpid() % len(ports)]}"
        self._pool = importlib.import_module("gpu_worker_pool").GPUWorkerPool(url, **scope)
        self._wishes: Settings = settings.get("wishes", {})
        self._pool.start()

    def take(self) -> Handle:
        assignment = self._pool.request_gpu(timeout=WAIT_S, **self._wishes)
        return Handle(assignment.gpu_id, time.monotonic(), os.getpid(), assignment)

    def release(self, handle: Handle) -> None:
        self._pool.release_gpu(handle.what)


class RedisLockTaker:
    """A lock of redis-py for each GPU, which expires after its timeout."""

    def __init__(self, settings: Settings) -> None:
        client = importlib.import_module("redis").Redis(host="127.0.0.1", port=settings["port"], socket_timeout=WAIT_S)
        self._locks = [
            client.lock(f"gpu:{gpu}", timeout=settings["ttl_s"], blocking=False) for gpu in range(settings["gpus"])
        ]

    def take(self) -> Handle:
        while True:
            for gpu in from_a_random_one(len(self._locks)):
                if self._locks[gpu].acquire():
                    return Handle(gpu, time.monotonic(), os.getpid(), self._locks[gpu])
            time.sleep(REDIS_SLEEP_S)

    def release(self, handle: Handle) -> None:
        handle.what.release()


class RedisListTaker:
    """A list in Redis with the GPUs that are free. A waiter blocks; the GPU of a holder that dies is lost."""

    def __init__(self, settings: Settings) -> None:
        self._client = importlib.import_module("redis").Redis(
            host="127.0.0.1", port=settings["port"], socket_timeout=None
        )

    def take(self) -> Handle:
        _, gpu = self._client.blpop(["gpus"], timeout=0)
        return Handle(int(gpu), time.monotonic(), os.getpid(), None)

    def release(self, handle: Handle) -> None:
        self._client.rpush("gpus", handle.gpu)


class FileLockTaker:
    """A lock file for each GPU."""

    def __init__(self, settings: Settings) -> None:
        library = importlib.import_module("filelock")
        folder = Path(settings["folder"])
        self._locks = [library.FileLock(str(folder / f"{gpu}.lock")) for gpu in range(settings["gpus"])]
        self._taken: type[Exception] = library.Timeout

    def take(self) -> Handle:
        while True:
            for gpu in from_a_random_one(len(self._locks)):
                try:
                    self._locks[gpu].acquire(blocking=False)
                except self._taken:
                    continue
                return Handle(gpu, time.monotonic(), os.getpid(), self._locks[gpu])
            time.sleep(FILELOCK_SLEEP_S)

    def release(self, handle: Handle) -> None:
        handle.what.release()


class PostgresTaker:
    """A session's advisory lock for each GPU. If all are taken it waits for one of them, picked at random, blocking."""

    def __init__(self, settings: Settings) -> None:
        connect = importlib.import_module("psycopg").connect
        self._connection = connect(settings["address"], autocommit=True)
        self._gpus: int = settings["gpus"]

    def take(self) -> Handle:
        gpu = next((gpu for gpu in from_a_random_one(self._gpus) if self._call("pg_try_advisory_lock", gpu)), None)
        if gpu is None:
            gpu = random.randrange(self._gpus)
            self._call("pg_advisory_lock", gpu)
        return Handle(gpu, time.monotonic(), os.getpid(), None)

    def release(self, handle: Handle) -> None:
        assert self._call("pg_advisory_unlock", handle.gpu)

    def _call(self, function: str, gpu: int) -> Any:
        return self._connection.execute(f"SELECT {function}(%s)", (gpu,)).fetchone()[0]


class StatisticsTaker:
    """Takes the GPU that the statistics show as the least used, if that is hardly used. Nobody is told.

    From then on the GPU is shown as used, until it is given back or the process is gone: see servers.py.
    """

    def __init__(self, settings: Settings) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", settings["port"], timeout=WAIT_S)
        self._folder = Path(settings["folder"])
        self._numbers = count()

    def take(self) -> Handle:
        while True:
            gpus = self._look()
            random.shuffle(gpus)
            least = min(gpus, key=lambda gpu: (gpu["memory_usage_percent"], gpu["utilization_percent"]))
            if max(least["memory_usage_percent"], least["utilization_percent"]) < FREE_PERCENT:
                gpu = int(least["gpu_id"])
                used = self._folder / f"{gpu}.{os.getpid()}.{next(self._numbers)}"
                used.touch()
                return Handle(gpu, time.monotonic(), os.getpid(), used)
            time.sleep(LOOK_S)

    def release(self, handle: Handle) -> None:
        handle.what.unlink()

    def _look(self) -> list[dict[str, Any]]:
        try:
            self._connection.request("GET", "/gpu/summary")
            answer = self._connection.getresponse().read()
        except (http.client.RemoteDisconnected, ConnectionError):
            # The server has closed a connection that was not used for a while.
            self._connection.close()
            return self._look()
        return list(json.loads(answer)["gpus_summary"])


class SchedulerTaker:
    """An input line for simple_gpu_scheduler: a command that reports when it runs, and ends when it is told to."""

    def __init__(self, settings: Settings) -> None:
        self._lines = os.open(settings["lines"], os.O_WRONLY | os.O_CLOEXEC)
        self._desk = Desk(f"{settings['folder']}/{os.getpid()}", WAIT_S)
        self._command = f"exec {settings['holder']} {self._desk.path}\n".encode()

    def take(self) -> Handle:
        os.write(self._lines, self._command)
        visitor = self._desk.wait()
        return Handle(visitor.gpus[0], visitor.at, visitor.pid, visitor)

    def release(self, handle: Handle) -> None:
        handle.what.end()


def from_a_random_one(number: int) -> Iterator[int]:
    """Yield all numbers, from a random one on, so that the first is not always tried first."""
    first = random.randrange(number)
    return ((first + step) % number for step in range(number))


TAKERS: dict[str, Callable[[Settings], Taker]] = {
    "pool": PoolTaker,
    "redis-lock": RedisLockTaker,
    "redis-list": RedisListTaker,
    "filelock": FileLockTaker,
    "postgres": PostgresTaker,
    "statistics": StatisticsTaker,
    "scheduler": SchedulerTaker,
}

# The modules that each client loads, and those below them: imported once, before many clients are forked.
MODULES = {
    "pool": ("gpu_worker_pool.core", "gpu_worker_pool.wire", "gpu_worker_pool.client"),
    "redis-lock": ("redis",),
    "redis-list": ("redis",),
    "filelock": ("filelock",),
    "postgres": ("psycopg",),
}
