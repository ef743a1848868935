"""The worker of a GPUExecutor as its crew sees it: a lease, the guard that holds it, and a process under that guard.

host/guard.py says what a guard does. It lives as long as any process that the worker has started, so the GPU of a worker
is not granted to others while one of them still uses it, however the worker, its executor or a task of it ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Mapping
from enum import Enum, IntEnum, auto
from math import inf
from typing import Any, Final

from gpu_worker_pool.client.pool_client import Assignment
from gpu_worker_pool.failure import Failure
from gpu_worker_pool.host.guarded import GuardDied, Guarded
from gpu_worker_pool.jobs.supervise import SupervisedCommand, supervise
from gpu_worker_pool.models import LeaseEnding
from gpu_worker_pool.wire.endings import after_warning

from .errors import ending_of
from .spawning import pool_of_one, worker_command
from .tasks import Task

# A worker gets SIGTERM at most half of its time before the end of its lease: the rest is for tasks.
_GRACE_PARTS: Final = 2
# For a worker that must end at once: enough for a handler of SIGTERM that only removes a file.
_LEAST_GRACE_S: Final = 0.5


class EndingWay(IntEnum):
    """How a worker is ended. Each takes a grace before it becomes the next harder one."""

    # It has nothing to do: it ends by itself. A lease that is only requested is withdrawn.
    QUIETLY = auto()
    # As Ctrl-C does.
    INTERRUPT = auto()
    # As the end of a lease demands it.
    TERMINATE = auto()
    # As a user demands it who has asked before: with hardly any grace.
    AT_ONCE = auto()


class Phase(Enum):
    """Where a worker is in its life."""

    REQUESTING = auto()
    STARTING = auto()
    IDLE = auto()
    BUSY = auto()
    # It is being ended, or has ended, and its lease is being released. It may still answer the task that it has.
    LEAVING = auto()


class Worker:
    """A worker, from the request for its lease until that is released. It begins with the guard alone, in whose name the
    lease is requested.
    """

    def __init__(
        self, main: Mapping[str, Any], initializer: Callable[..., object] | None, initargs: tuple[Any, ...]
    ) -> None:
        self._line, self._theirs = socket.socketpair()
        try:
            self.pool = pool_of_one(self._line, main, initializer, initargs)
            self.guarded = Guarded.start(grace_parts=_GRACE_PARTS)
        except BaseException:
            self._line.close()
            self._theirs.close()
            raise
        self.request: asyncio.Task[Assignment] | None = None
        self.closing: asyncio.Future[None] | None = None
        self.phase = Phase.REQUESTING
        self.way = EndingWay.QUIETLY
        self.idle_since = inf
        self.tasks_done = 0
        # The one that it had when it ended.
        self.lost_task: Task | None = None
        self.pid: int | None = None
        self.gpu_ids: tuple[int | str, ...] = ()
        self.grace_s = 0.0
        self.exit_code: int | None = None
        self._ending = "has not ended"
        # Why its lease is about to end, a code of the server's, and why it was lost.
        self.notice = ""
        self.loss: str | None = None
        # Why it was ended, if not by its own fault.
        self.cause: str | None = None
        # Whether it ended before it was ready, and whether that is because of its lease; None: the crew wanted it.
        self.was_lease_short: bool | None = None

    @property
    def where(self) -> str:
        return f" on GPU {', '.join(map(str, self.gpu_ids))}" if self.gpu_ids else ""

    @property
    def reason(self) -> str:
        """Why it has not answered, in words: `worker 12345 on GPU 2 was killed by SIGKILL`."""
        if self.cause is not None:
            return self.cause
        return f"{'the worker' if self.pid is None else f'worker {self.pid}'}{self.where} {self._ending}"

    @property
    def is_guard_gone(self) -> bool:
        """Whether the holder of the lease was killed before it had a command."""
        try:
            return os.waitid(os.P_PID, self.guarded.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    async def run(
        self,
        assignment: Assignment,
        grace_s: float,
        on_warning: Callable[[LeaseEnding | None], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """Run its process until nothing of it is left."""
        self.gpu_ids, self.grace_s = tuple(assignment.gpu_ids), grace_s
        with open(os.devnull, "wb") as nothing:  # noqa: ASYNC230, PTH123 - quick
            output, errors = (number if _is_open(number) else nothing.fileno() for number in (1, 2))
            command = SupervisedCommand(
                argv=worker_command(),
                env=os.environ,
                streams=(self._theirs.fileno(), output, errors),
                grace_s=grace_s,
                finishes_work=True,
            )
            try:
                outcome = await supervise(
                    self.guarded,
                    assignment,
                    command,
                    on_started=self._theirs.close,
                    on_warning=on_warning,
                    on_lost=on_lost,
                )
            except GuardDied:
                # The server may have told before that the holder of the lease is dead.
                self.cause, self._ending = None, "was killed with its guard"
                return
            except Failure as failure:
                self._ending = f"could not be started: {failure}"
                return
            finally:
                self._theirs.close()  # what has it open is the process, or nothing
        self.exit_code = os.waitstatus_to_exitcode(outcome.status)
        why = "" if outcome.end_reason is None else f" {after_warning(outcome.end_reason)}"
        self._ending = f"{ending_of(self.exit_code)}{why}"

    def end(self, way: EndingWay) -> None:
        """End its process. `run` returns when it is gone."""
        self.close_pool()
        if way is EndingWay.INTERRUPT:
            self.guarded.send_signal(signal.SIGINT)
        if way in {EndingWay.QUIETLY, EndingWay.INTERRUPT}:
            asyncio.get_running_loop().call_later(self.grace_s, self.guarded.end, self.grace_s)
        else:
            self.guarded.end(self.grace_s if way is EndingWay.TERMINATE else min(self.grace_s, _LEAST_GRACE_S))

    def close_pool(self) -> asyncio.Future[None]:
        """Let the process end once it has no task; done when it has ended, and all that it answered was taken in."""
        if self.closing is None:
            self.closing = asyncio.get_running_loop().run_in_executor(None, self.pool.shutdown)
        return self.closing

    def send_nothing(self) -> None:
        """Have the process end that waits for what it needs to start."""
        self._line.shutdown(socket.SHUT_WR)

    async def close(self) -> None:
        """End the guard, and what may be left of the process."""
        await self.guarded.close()
        self._line.close()
        self._theirs.close()


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
