"""A worker as the executor sees it: the guard that holds its lease, and the process that runs its tasks.

host/guard.py says what a guard does. It lives as long as any process that the worker has started, so the GPU of a worker
is not granted to others while one of them still uses it, however the worker, its executor or a task of it ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path
from typing import Any, Final

from gpu_worker_pool.client.inherited_lease import LEASE_ID_VARIABLE
from gpu_worker_pool.host import guard
from gpu_worker_pool.host.clock import boot_time

from . import worker
from .crew import EndingWay
from .errors import ending_of
from .message_line import MessageLine
from .orphans import kill_orphans

_NO_PROC: Final = (
    "/proc does not show this process, so what a task starts could not be ended with it; mount the /proc of this container "
    "(mount -t proc proc /proc)"
)
# For a worker that must end at once: enough for a handler of SIGTERM that only removes a file.
_LEAST_GRACE_S: Final = 0.5
# As in `worker 12345 on GPU 2 was killed by SIGTERM, because ...`
_LIMITED: Final = ", because its lease was about to reach its time limit"
_LATE: Final = ", because no heartbeat of its lease had reached the server for too long"


@dataclass(frozen=True, slots=True)
class WorkerLease:
    """What a worker and its guard are told of the lease. Times are on the clock of leases; None: not limited."""

    env: Mapping[str, str]
    gpu_ids: tuple[int | str, ...]
    grace_s: float
    safe_until: float | None
    limit: float | None


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """What a worker has said: one of the kinds in worker.py, the number of its task, and the rest."""

    kind: bytes
    task: int
    body: memoryview


class WorkerProcess:
    """One worker. It begins with the guard alone, in whose name the lease is requested."""

    def __init__(self, number: int) -> None:
        if not guard.can_see_processes():
            raise RuntimeError(_NO_PROC)
        self.number = number
        ours, theirs = socket.socketpair()
        with theirs:
            self._guard = subprocess.Popen(  # noqa: S603 - our own program
                # -I and -S: nothing of the user's environment, and no packages.
                [sys.executable, "-I", "-S", str(Path(guard.__file__)), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # In a group of its own, because Ctrl-C is for the user's program.
                process_group=0,
            )
        self.guard_line = MessageLine(ours, guard.LENGTH)
        self.task_line: MessageLine | None = None
        self.pid: int | None = None
        self.exit_code: int | None = None
        # Why there is no exit code.
        self._failure: str | None = None
        # Why the guard has ended it without being told to, as the end of a sentence.
        self.why_ended = ""
        self._is_told_to_end = False
        self._grace_s = 0.0
        self._lease_id = ""
        self.gpu_ids: tuple[int | str, ...] = ()

    @property
    def guard_pid(self) -> int:
        """The holder of the lease."""
        return self._guard.pid

    @property
    def lines(self) -> list[MessageLine]:
        return [self.guard_line] if self.task_line is None else [self.guard_line, self.task_line]

    @property
    def has_hung_up(self) -> bool:
        """Whether it answers no more."""
        return self.task_line is not None and self.task_line.is_over

    @property
    def is_gone(self) -> bool:
        """Whether none of its processes is left."""
        return self.exit_code is not None or self._failure is not None

    @property
    def ending(self) -> str:
        """How it ended: `worker 12345 on GPU 2 was killed by SIGKILL`."""
        name = "the worker" if self.pid is None else f"worker {self.pid}"
        where = f" on GPU {', '.join(map(str, self.gpu_ids))}" if self.gpu_ids else ""
        how = ending_of(self.exit_code) if self.exit_code is not None else self._failure or "has not ended"
        return f"{name}{where} {how}"

    def start(self, lease: WorkerLease, message: bytes, descriptors: Sequence[int]) -> None:
        """Start the process on its lease, with the message that prepares it."""
        self._grace_s, self.gpu_ids = lease.grace_s, lease.gpu_ids
        self._lease_id = lease.env.get(LEASE_ID_VARIABLE, "")
        ours, theirs = socket.socketpair()
        self.task_line = MessageLine(ours, worker.LENGTH)
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # noqa: SLF001
        start = {
            "do": "start",
            "command": [os.fsdecode(spawn.get_executable()), *flags, str(Path(worker.__file__))],
            "env": dict(lease.env),
            "safe_until": lease.safe_until,
            "limit": lease.limit,
            "limit_grace_s": lease.grace_s,
            "group": 0,
            "grace_s": lease.grace_s,
        }
        with theirs, open(os.devnull, "wb") as nothing:  # noqa: PTH123 - quick
            streams = [number if _is_open(number) else nothing.fileno() for number in (1, 2)]
            self.guard_line.send(_encoded(start), descriptors=[theirs.fileno(), *streams])
        self.task_line.send(message, descriptors=descriptors)

    def send_task(self, task: int, call: bytes) -> bool:
        """Send a task; returns False if it has certainly not arrived, because the process has ended."""
        if self.task_line is not None and not self.task_line.is_broken:
            self.task_line.send(worker.TASK.pack(task), call)
            return not self.task_line.is_broken
        return False

    def tell_safe_until(self, at: float) -> None:
        """Tell the guard when to end the worker, unless it is told a later time."""
        self._tell({"do": "safe", "until": at})

    def tell_limit(self, at: float | None) -> None:
        """Tell the guard when the lease ends: the worker is told to end one grace before, and killed then."""
        self._tell({"do": "limit", "at": at, "grace_s": self._grace_s})

    def end(self, way: EndingWay) -> None:
        """End it. `receive_from_guard` says when it is gone."""
        self._is_told_to_end = True
        if self.task_line is None:
            self.guard_line.finish()  # a guard without a command ends with its line
            return
        self.task_line.finish()
        if way in {EndingWay.TERMINATE, EndingWay.AT_ONCE}:
            grace_s = self._grace_s if way is EndingWay.TERMINATE else min(self._grace_s, _LEAST_GRACE_S)
            self._tell({"do": "end", "grace_s": grace_s})
            return
        if way is EndingWay.INTERRUPT:
            self._tell({"do": "signal", "number": signal.SIGINT})
        self._tell({"do": "limit", "at": boot_time() + 2 * self._grace_s, "grace_s": self._grace_s})

    def receive_from_guard(self) -> None:
        """Take in what the guard says: whether the worker is gone, and how it ended."""
        for message in self.guard_line.receive():
            said = json.loads(message)
            if said["event"] == "ended":
                self.exit_code = os.waitstatus_to_exitcode(said["status"])
                if said["was_late"]:
                    self.why_ended = _LATE
                elif said["was_limited"] and not self._is_told_to_end:
                    self.why_ended = _LIMITED
            elif said["event"] == "failed":
                self._failure = f"could not be started: {said['why']}"
        if self.guard_line.is_over and not self.is_gone:
            self._failure = "has ended" if self.task_line is None else "was killed with its guard"
            # The kernel kills the worker with its guard, and this what the worker had started.
            if self.pid is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
            kill_orphans(self._lease_id)

    def receive_from_worker(self) -> Iterator[WorkerAnswer]:
        """Its answers that have arrived."""
        for message in self.task_line.receive() if self.task_line is not None else ():
            kind, task = worker.ANSWER.unpack_from(message)
            body = memoryview(message)[worker.ANSWER.size :]
            if kind == worker.READY:
                self.pid = int(bytes(body))
            yield WorkerAnswer(kind, task, body)

    def close(self) -> None:
        """Close both lines; the guard ends with its own. Called when the lease is released."""
        self.forget()
        self._guard.wait()

    def forget(self) -> None:
        """Close both lines in a forked process, in which the worker is that of the parent."""
        for line in self.lines:
            line.close()

    def _tell(self, message: dict[str, Any]) -> None:
        self.guard_line.send(_encoded(message))


def _encoded(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode()


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
