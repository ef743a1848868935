"""Where commands print. Results go to standard output, everything else to standard error; colours only on a terminal."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console


class _Console(Console):
    """Says like everything else that nobody reads any more; rich's own would end the program with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def out() -> Console:
    """For results. Where it is no terminal nothing is cut off: who reads it line by line wants whole lines."""
    console = _Console(highlight=False)
    return console if console.is_terminal else _Console(highlight=False, width=200, soft_wrap=True)


def err() -> Console:
    """For what is said beside the results."""
    return _Console(stderr=True, highlight=False, soft_wrap=True)


def stop_printing() -> None:
    """Nobody reads our results any more (head has had enough, say): what is still to be written of them goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def print_json(command: str, data: Mapping[str, Any]) -> None:
    """One object on one line. Its schema, by name and version, is documented in docs/CLI.md: keys are added, never
    taken away or given another meaning within a version.
    """
    print(json.dumps({"schema": f"gpu-pool/{command}/1", **data}), flush=True)  # noqa: T201 - that is what it is for


def plain(value: object) -> str:
    """A text without anything that a terminal would obey: no control characters, none that turn the direction."""
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in str(value))


def complain(message: str) -> None:
    """A line on standard error; what a server said may be in it."""
    with contextlib.suppress(OSError):  # there is nobody left to tell
        print(f"gpu-pool: {plain(message)}", file=sys.stderr, flush=True)  # noqa: T201


def pass_on_warnings(say: Callable[[str], None]) -> None:
    """Have what the client warns of said like this. What happens to a request of ours we tell ourselves."""
    logger = logging.getLogger("gpu_worker_pool")
    logger.addHandler(_Warnings(say))
    logger.propagate = False


class _Warnings(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        if not hasattr(record, "event"):
            self._say(record.getMessage())
