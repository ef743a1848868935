"""Processes that live until they are told to end, and the reports of their deaths."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Callable

from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.host.processes import ProcessTable

GENEROUS_S = 60.0
CAT = shutil.which("cat") or "/bin/cat"


def not_implemented(pid: int) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


class Child:
    """A process of ours that ends by itself when its input is closed."""

    def __init__(self) -> None:
        self.popen = subprocess.Popen([CAT], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self.id = ProcessId(self.popen.pid, ProcessTable().started(self.popen.pid))

    def kill(self) -> None:
        """Dead when this returns, but a zombie: it is not reaped."""
        os.kill(self.id.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.id.pid, os.WEXITED | os.WNOWAIT)

    def end(self) -> None:
        """Gone without a trace when this returns."""
        self.popen.communicate(timeout=GENEROUS_S)


class Reports:
    """The leases that were reported, and a way to wait for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.leases: list[str] = []
        self._loop = loop
        self._came = asyncio.Event()

    def __call__(self, lease_id: str) -> None:
        assert asyncio.get_running_loop() is self._loop
        self.leases.append(lease_id)
        self._came.set()

    def until(self, count: int) -> list[str]:
        async def wait() -> None:
            async with asyncio.timeout(GENEROUS_S):
                while len(self.leases) < count:
                    self._came.clear()
                    await self._came.wait()

        self._loop.run_until_complete(wait())
        return self.leases


Start = Callable[[], Child]
