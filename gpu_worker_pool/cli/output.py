"""The output of commands: results to standard output, everything else to standard error; colours only on a terminal."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from gpu_worker_pool.wire.reader import plain as plain  # noqa: PLC0414 - for all commands


class _Console(Console):
    """A console that raises BrokenPipeError as print does; rich's own would end the program with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def out() -> Console:
    """The console for results. In a pipe nothing is cut or wrapped: its reader needs whole lines."""
    console = _Console(highlight=False)
    return console if console.is_terminal else _Console(highlight=False, width=200, soft_wrap=True)


def asked_width() -> int | None:
    """The width that COLUMNS asks for; shells do not set it for the programs they start."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None


def err() -> Console:
    return _Console(stderr=True, highlight=False, soft_wrap=True)


def is_output_broken() -> bool:
    """Whether the reader of standard output or standard error is gone: a pipe is closed, a terminal hung up."""
    outputs = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # it is closed, or not a file
            outputs.register(stream.fileno(), 0)
    return any(state & (select.POLLERR | select.POLLHUP) for _, state in outputs.poll(0))


def stop_printing() -> None:
    """Discard standard output from now on, because it cannot be written (`head` has had enough, say)."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def print_json(command: str, data: Mapping[str, Any]) -> None:
    """Print one object on one line. docs/CLI.md documents its schema, by name and version: within a version, keys are
    added, but never removed or given another meaning.
    """
    print(json.dumps({"schema": f"gpu-pool/{command}/1", **data}), flush=True)  # noqa: T201 - the result


def complain(message: str) -> None:
    """Print a line on standard error. The message may quote a server."""
    with contextlib.suppress(OSError):  # the reader is gone
        print(f"gpu-pool: {plain(message)}", file=sys.stderr, flush=True)  # noqa: T201


def pass_on_warnings(say: Callable[[str], None]) -> None:
    logger = logging.getLogger("gpu_worker_pool")
    logger.addHandler(WarningHandler(say))
    logger.propagate = False


class WarningHandler(logging.Handler):
    """Passes warnings on, but not log records of events: the command reports those itself."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        if not hasattr(record, "event"):
            self._say(record.getMessage())
