"""What a new worker is sent: what `multiprocessing` would tell a process that it spawns, and the initializer.

Queues, locks and connections of `multiprocessing` may be among the initializer's arguments, as in ProcessPoolExecutor.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing import context, resource_tracker, spawn
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, cast

from .worker import MOST_DESCRIPTORS

_MAIN: Final = "init_main_"


class _PassedDescriptor:
    def __init__(self, number: int) -> None:
        self.number = number


class _NewWorker:
    """Stands for the process that is about to be spawned, and gathers the descriptors that go with it."""

    DupFd = _PassedDescriptor

    def __init__(self) -> None:
        # The worker unlinks nothing that belongs to others if it has the tracker of this process.
        resource_tracker.ensure_running()
        tracker = resource_tracker.getfd()
        assert tracker is not None  # noqa: S101 - it runs now
        self.descriptors = [tracker]

    def duplicate_for_child(self, descriptor: int) -> int:
        self.descriptors.append(descriptor)
        return len(self.descriptors) - 1


class _Pickler(ForkingPickler):
    def persistent_id(self, thing: object) -> int | None:
        return thing.number if isinstance(thing, _PassedDescriptor) else None


def main_module() -> dict[str, Any]:
    """How to load the main module in a worker; nothing, where it was typed in. It is asked for while the program runs: at
    its end, Python forgets it.

    RuntimeError in a process whose main module is only being loaded: it must not start others.
    """
    found = {name: value for name, value in spawn.get_preparation_data("").items() if name.startswith(_MAIN)}
    return {} if is_typed_in() else found


def is_typed_in() -> bool:
    """Whether the main module is that of a notebook or a shell, or comes from -c or standard input: it has no file."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is None and (path is None or not os.path.exists(path))  # noqa: PTH110


def start_message(
    name: str, main: dict[str, Any], initializer: Callable[..., object] | None, initargs: tuple[Any, ...]
) -> tuple[bytes, list[int]]:
    """The message, and the descriptors that go with it."""
    told = spawn.get_preparation_data(name)
    setup = {**{name: value for name, value in told.items() if not name.startswith(_MAIN)}, **main}
    setup["authkey"] = bytes(setup["authkey"])
    spawned, pickled = _NewWorker(), io.BytesIO()
    context.set_spawning_popen(cast("Any", spawned))
    try:
        _Pickler(pickled, pickle.HIGHEST_PROTOCOL).dump((initializer, initargs))
    finally:
        context.set_spawning_popen(None)
    if len(spawned.descriptors) > MOST_DESCRIPTORS:
        raise ValueError(
            f"initargs have {len(spawned.descriptors) - 1} open files or connections in them; at most "
            f"{MOST_DESCRIPTORS - 1} can be passed to a worker"
        )
    return pickle.dumps((setup, pickled.getvalue())), spawned.descriptors
