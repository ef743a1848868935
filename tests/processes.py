"""Real processes: one to look at, and whether one has ended."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def child_process() -> Iterator[subprocess.Popen[bytes]]:
    """A process below this one, that ends when its input is closed."""
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        yield process


@contextmanager
def forked_child() -> Iterator[None]:
    """A fork of this process, with all that is open here, until the block is left."""
    (asks, tells), (hears, says) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(tells)
        os.write(says, b"forked")
        os.read(asks, 1)
        os._exit(0)
    try:
        os.read(hears, 6)
        yield
    finally:
        for end in (asks, tells, hears, says):
            os.close(end)
        os.waitpid(child, 0)


def has_ended(pid: int, within_s: float = 5.0) -> bool:
    """Whether the process is over, be it that nobody has waited for it; waits for its end, not for a time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], within_s)[0])
    finally:
        os.close(descriptor)
