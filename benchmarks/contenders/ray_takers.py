"""Ray's tasks and actors with `num_gpus=1`, in the same two calls. A driver asks; the process that holds the GPU is Ray's."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from benchmarks.contenders.desk import Desk, report_and_hold
from benchmarks.contenders.takers import WAIT_S, Handle, Settings, Taker

ray: Any = None
_desks = count()
_connecting = threading.Lock()


def connect(settings: Settings) -> None:
    """Connect to Ray, once in a driver; its threads share the connection."""
    global ray  # noqa: PLW0603 - the library is where it is only in the environment of the peers
    with _connecting:
        if ray is None:
            library = importlib.import_module("ray")
            library.init(address=settings["address"], log_to_driver=False, logging_level="error")
            ray = library


def nothing() -> None:
    """The shortest task."""


def report(path: str) -> None:
    """Run as a task: report the GPU, and end when told to."""
    report_and_hold(path, [int(gpu) for gpu in importlib.import_module("ray").get_gpu_ids()])


class Holder:
    """An actor that has a GPU for as long as it lives."""

    def __init__(self) -> None:
        self._at = time.monotonic()

    def told(self) -> tuple[int, float, int]:
        """Return its GPU, its start time and its pid."""
        return int(importlib.import_module("ray").get_gpu_ids()[0]), self._at, os.getpid()


class RayTaskTaker:
    """A task for each use of a GPU. By default Ray ends the process of a task that had a GPU (`max_calls=1`)."""

    options: dict[str, Any] = {}  # noqa: RUF012 - never changed

    def __init__(self, settings: Settings) -> None:
        connect(settings)
        # By default a task asks for a CPU as well; here it must wait only for a GPU.
        options = {"num_gpus": 1, "num_cpus": 0, "max_retries": 0, **self.options, **settings.get("wishes", {})}
        self._nothing = ray.remote(**options)(nothing)
        self._report = ray.remote(**options)(report)
        self._desk = Desk(f"{settings['folder']}/{os.getpid()}-{next(_desks)}", WAIT_S)

    def take(self) -> Handle:
        task = self._report.remote(self._desk.path)
        visitor = self._desk.wait()
        return Handle(visitor.gpus[0], visitor.at, visitor.pid, (task, visitor))

    def release(self, handle: Handle) -> None:
        handle.what[1].end()

    def cycle(self) -> None:
        """Submit a task and wait for its answer, as a user of Ray does."""
        ray.get(self._nothing.remote())


class RayReusedTaskTaker(RayTaskTaker):
    """The same tasks, in processes that Ray uses again."""

    options = {"max_calls": 0}  # noqa: RUF012 - never changed


class RayActorTaker:
    """An actor for each use of a GPU: made, asked for its GPU, and killed."""

    def __init__(self, settings: Settings) -> None:
        connect(settings)
        self._actor = ray.remote(num_gpus=1, num_cpus=0)(Holder)

    def take(self) -> Handle:
        actor = self._actor.remote()
        gpu, at, pid = ray.get(actor.told.remote(), timeout=WAIT_S)
        return Handle(gpu, at, pid, actor)

    def release(self, handle: Handle) -> None:
        ray.kill(handle.what)


TAKERS: dict[str, Callable[[Settings], Taker]] = {
    "ray-task": RayTaskTaker,
    "ray-task-reused": RayReusedTaskTaker,
    "ray-actor": RayActorTaker,
}
