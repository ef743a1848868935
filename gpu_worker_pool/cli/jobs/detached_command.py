"""The command of a job and its guard, as the keeper sees them. The guard outlives the keeper, and is found again.

While a job waits, its guard is a shell that reads one line: a fifth of a megabyte. When the job has its GPUs, that shell
becomes the guard, as the same process. So 200 waiting jobs are cheap, each has a holder of its own from the beginning, and
the lease of a job ends with its own guard and with no other process.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from gpu_worker_pool.cli.run.guarded_command import GuardDied, GuardLine, check_proc
from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.host import detached_guard, guard
from gpu_worker_pool.host.clock import boot_id
from gpu_worker_pool.host.identity import Machine, own_proc, pid_namespace
from gpu_worker_pool.host.processes import ProcessTable
from gpu_worker_pool.jobs.life import GuardFacts

from .keeper_link import uid_at

_SHELL: Final = "/bin/sh"
# The line closes when the keeper dies: the shell ends then, and with it the request of the job.
_WAIT: Final = 'read -r _ && exec "$0" "$@"'
_GO: Final = b"go\n"
# The guard takes this long to start at most; a machine may be busy.
_START_S: Final = 60.0
# One without a command ends at once.
_END_S: Final = 1.0
_CONNECT_AGAIN_S: Final = 0.05


class DetachedCommand(GuardLine):
    """A command under a guard of its own. `facts` say how another keeper finds the guard."""

    def __init__(self, line: socket.socket, facts: GuardFacts, child: subprocess.Popen[bytes] | None) -> None:
        super().__init__(line, facts.pid)
        self.facts = facts
        self._child = child
        if child is not None:
            self._guards.add(child.pid)

    @classmethod
    def spawn(cls) -> Self:
        """Start the process that becomes the guard; OSError where that cannot be done."""
        check_proc()
        guard.become_subreaper()
        address = f"gpu-worker-pool/job/{secrets.token_hex(16)}"
        line, theirs = socket.socketpair()
        listener = socket.socket(socket.AF_UNIX)
        try:
            with theirs, listener:
                listener.bind(f"\0{address}")
                listener.listen(8)
                program = [sys.executable, "-I", "-S", detached_guard.__file__, str(listener.fileno())]
                child = subprocess.Popen(  # noqa: S603 - our own program
                    [_SHELL, "-c", _WAIT, *program],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    pass_fds=[listener.fileno()],
                    # Its own folder may be deleted, and its session is not that of any terminal.
                    cwd="/",
                    start_new_session=True,
                    env={name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ},
                )
        except BaseException:
            line.close()
            raise
        proc = own_proc()
        facts = GuardFacts(
            pid=child.pid,
            started=ProcessTable(proc).started(child.pid) if proc else None,
            boot_id=boot_id(),
            pid_namespace=pid_namespace(),
            address=address,
        )
        return cls(line, facts, child)

    @classmethod
    async def find(cls, facts: GuardFacts) -> Self | None:
        """The guard of a job that an earlier keeper started; None where it is gone."""
        if facts.boot_id != boot_id():
            return None
        machine, process = Machine.here(), ProcessId(facts.pid, facts.started)
        is_visible = facts.pid_namespace == pid_namespace()
        while True:
            line = socket.socket(socket.AF_UNIX)
            try:
                line.connect(f"\0{facts.address}")
                is_ours = uid_at(line) == os.geteuid()
            except OSError:
                is_ours = False
            if not is_ours:
                line.close()
            else:
                found = cls(line, facts, None)
                with suppress(GuardDied):
                    await found._receive()
                    return found
            # One that has its outcome written down is about to end, and no longer listens.
            if not is_visible or not machine.is_alive(process):
                return None
            await asyncio.sleep(_CONNECT_AGAIN_S)

    @property
    def is_alive(self) -> bool:
        return self._child is None or self._child.poll() is None

    async def wake(self, outcome: Path, keeper: Mapping[str, Any]) -> None:
        """Make the waiting process the guard, which is to write down here what becomes of the command, and to start a keeper so
        if this one is gone. GuardDied where the process is gone.
        """
        try:
            self._line.send(_GO)
            async with asyncio.timeout(_START_S):
                await self._receive()
                self._line.send(guard.frame({"do": "prepare", "outcome": str(outcome), "keeper": keeper}))
                await self._receive()
        except (OSError, TimeoutError):
            self.close()
            raise GuardDied from None

    def close(self) -> None:
        """Let go of the guard. One whose command runs goes on; one without a command ends."""
        self._line.close()
        child = self._child
        if child is not None and child.returncode is None:
            try:
                child.wait(timeout=_END_S)
            except subprocess.TimeoutExpired:
                return  # its processes are still guarded
        super().close()
