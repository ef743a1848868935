"""A server that counts what each lease call costs it: `python -m tests.server.counted_server`. SIGUSR1 writes the counts.

It is the real server. What it calls is counted from outside: the event loop is a uvloop that counts, and some functions of
the package and of the standard library are wrapped. The counts of a call are those from its arrival until the next one
arrives.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import signal
import sys
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import uvloop
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

FILE = "COUNTS_FILE"
# The functions of the package that are counted, each where it is looked up.
COUNTED = {
    "commits": "ledger.sqlite.file:SqliteFile.transaction",
    "steps of the core": "ledger.driver:step",
    "heads of requests read": "server.http.protocol:BoundedProtocol.on_headers_complete",
}

_calls: list[tuple[str, Counter[str]]] = [("", Counter())]


def count(what: str) -> None:
    _calls[-1][1][what] += 1


class CountingLoop(uvloop.Loop):
    """Counts what is asked of it, under these names."""


def wrap(place: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function of the package."""
    module, _, path = place.partition(":")
    owner: Any = import_module(f"gpu_worker_pool.{module}")
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    setattr(owner, name, around(getattr(owner, name)))


def before(note: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **options: Any) -> Any:
        note(*args)
        return function(*args, **options)

    return noted


def counting(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda function: before(lambda *_: count(what), function)


for _name, _what in {
    "create_task": "tasks",
    "create_future": "futures",
    "call_soon": "callbacks",
    "call_at": "timers",
    "call_later": "timers",
    "call_soon_threadsafe": "hand-overs between threads",
}.items():
    setattr(CountingLoop, _name, counting(_what)(getattr(uvloop.Loop, _name)))


def arrived(_: object, data: bytes) -> None:
    """Count for another call from here on. Its kind is its method and the id of its lease up to a hyphen."""
    method, path = data.decode("latin-1").split(" ", 2)[:2]
    _calls.append((f"{method} {path.rpartition('/')[2].partition('-')[0]}", Counter()))


def opened(event: str, _: object) -> None:
    if event == "open":
        count("files opened")


def write_counts(*_: object) -> None:
    file = Path(os.environ[FILE])
    new = file.with_suffix(".new")
    new.write_text(json.dumps(_calls), encoding="utf-8")
    new.rename(file)


def decided(_: object, command: object, *__: object) -> None:
    count(f"decisions: {type(command).__name__}")


if __name__ == "__main__":
    for what, place in COUNTED.items():
        wrap(place, counting(what))
    wrap("core.decider.step:decide", lambda function: before(decided, function))
    wrap("server.http.protocol:BoundedProtocol.data_received", lambda function: before(arrived, function))
    for name, what in (("stat", "files looked at"), ("pwrite", "files written, without SQLite")):
        setattr(os, name, counting(what)(getattr(os, name)))
    setattr(logging.Logger, "makeRecord", counting("records of the log")(logging.Logger.makeRecord))  # noqa: B010 - as below
    setattr(RequestResponseCycle, "send", counting("messages by uvicorn")(RequestResponseCycle.send))  # noqa: B010 - as below
    sys.addaudithook(opened)
    setattr(uvloop, "new_event_loop", CountingLoop)  # noqa: B010 - it is not the type that mypy knows
    signal.signal(signal.SIGUSR1, write_counts)
    runpy.run_module("gpu_worker_pool.testing", run_name="__main__", alter_sys=True)
