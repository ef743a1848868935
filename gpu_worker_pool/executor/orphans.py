"""What is left of a worker whose guard is dead: processes that have lost their parents, and are known by their lease."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from gpu_worker_pool.client.inherited_lease import LEASE_ID_VARIABLE

# A process may fork while it is looked for. What is there after so many rounds is stuck in the kernel.
_MOST_ROUNDS: Final = 200
_PAUSE_S: Final = 0.005


def kill_orphans(lease_id: str) -> None:
    """Kill all processes that were started with this lease in their environment. One that has none cannot be found."""
    if not lease_id or lease_id == os.environ.get(LEASE_ID_VARIABLE):
        return  # it is that of the program itself
    mark = f"{LEASE_ID_VARIABLE}={lease_id}".encode()
    for _ in range(_MOST_ROUNDS):
        found = [pid for pid in _processes() if pid != os.getpid() and _is_marked(pid, mark)]
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def _processes() -> Iterator[int]:
    """Nothing where /proc has the numbers of another namespace."""
    if os.readlink("/proc/self") == str(os.getpid()):  # noqa: PTH115 - it is compared as text
        yield from (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208 - quick


def _is_marked(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False  # it has just ended, or it is that of another user
