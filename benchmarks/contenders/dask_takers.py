"""Dask's tasks with one GPU each, in the same two calls. A client asks; the process that holds the GPU is Dask's worker."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

from benchmarks.contenders.desk import Desk, report_and_hold
from benchmarks.contenders.takers import WAIT_S, Handle, Settings, Taker

_client: Any = None
_desks = count()
_connecting = threading.Lock()


def connect(settings: Settings) -> Any:
    """Return the client of this process, which its threads share."""
    global _client  # noqa: PLW0603 - made once, when the first thread needs it
    with _connecting:
        if _client is None:
            _client = importlib.import_module("distributed").Client(settings["address"], set_as_default=False)
    return _client


def nothing() -> None:
    """The shortest task."""


def report(path: str) -> None:
    """Run as a task: report the GPU, which has the name of the worker, and end when told to."""
    report_and_hold(path, [int(importlib.import_module("distributed").get_worker().name)])


class DaskTaker:
    """A task for each use of a GPU."""

    def __init__(self, settings: Settings) -> None:
        self._client = connect(settings)
        self._desk = Desk(f"{settings['folder']}/{os.getpid()}-{next(_desks)}", WAIT_S)

    def take(self) -> Handle:
        task = self._submit(report, self._desk.path)
        visitor = self._desk.wait()
        # A task ends when its result is no longer referred to, so the handle refers to it.
        return Handle(visitor.gpus[0], visitor.at, visitor.pid, (task, visitor))

    def release(self, handle: Handle) -> None:
        handle.what[1].end()

    def cycle(self) -> None:
        """Submit a task and wait for its result, as a user of Dask does."""
        self._submit(nothing).result(timeout=WAIT_S)

    def _submit(self, task: Callable[..., None], *arguments: str) -> Any:
        return self._client.submit(task, *arguments, resources={"GPU": 1}, pure=False)


TAKERS: dict[str, Callable[[Settings], Taker]] = {"dask": DaskTaker}
