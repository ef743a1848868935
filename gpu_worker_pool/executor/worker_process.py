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

from gpu_worker_pool.client.guarded_lease import command_env, grace_after_loss, limit_of, on_lease_clock, safe_until
from gpu_worker_pool.client.pool_client import Assignment
from gpu_worker_pool.failure import Failure
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.host.guarded import GuardDied, Guarded
from gpu_worker_pool.wire.endings import after_warning

from .errors import ending_of
from .spawning import pool_of_one, worker_command
from .tasks import Task

# A worker gets SIGTERM at most half of its time before the end of its lease: the rest is for tasks.
_GRACE_PARTS: Final = 2
# For a worker that must end at once: enough for a handler of SIGTERM that only removes a file.
_LEAST_GRACE_S: Final = 0.5
# As in `worker 12345 on GPU 2 was killed by SIGTERM, because ...`
_LIMITED: Final = ", because its lease was about to reach its time limit"
_LATE: Final = ", because no heartbeat of its lease had reached the server for too long"
_UPDATES_PER_TTL: Final = 20
_MAX_UPDATE_INTERVAL_S: Final = 1.0
# A worker that is not seen by the server is killed so long before an announced end, so that it is gone by then.
_KILL_AHEAD_S: Final = 0.5


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

    async def run(self, assignment: Assignment) -> None:
        """Run its process until nothing of it is left."""
        try:
            with self._theirs, open(os.devnull, "wb") as nothing:  # noqa: ASYNC230, PTH123 - quick
                output, errors = (number if _is_open(number) else nothing.fileno() for number in (1, 2))
                await self.guarded.run(
                    worker_command(),
                    command_env(os.environ, assignment),
                    (self._theirs.fileno(), output, errors),
                    grace_s=self.grace_s,
                    safe_until=safe_until(assignment),
                    limit=limit_of(assignment),
                )
            ended = await self.guarded.wait()
        except GuardDied:
            # The server may have told before that the holder of the lease is dead.
            self.cause, self._ending = None, "was killed with its guard"
        except Failure as error:
            self._ending = f"could not be started: {error}"
        else:
            self.exit_code = os.waitstatus_to_exitcode(ended.status)
            why = _LATE if ended.was_late else _LIMITED if ended.was_limited else ""
            why = f" {after_warning(self.notice)}" if self.notice else why
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


def grace_on(assignment: Assignment, grace_s: float) -> float:
    """What is left of a lease that has a TTL is less than that TTL. Of a short lease, half is left for tasks."""
    ttl_s = None if getattr(assignment.lost, "is_local", True) else getattr(assignment.lost, "ttl_s", None)
    limit = limit_of(assignment)
    grace_s = grace_s if limit is None else min(grace_s, max(limit - boot_time(), 0.0) / 2)
    return grace_s if ttl_s is None else grace_after_loss(grace_s, ttl_s)


async def watch(
    assignment: Assignment,
    guarded: Guarded,
    grace_s: float,
    on_warning: Callable[[str], None],
    on_lost: Callable[[str], None],
) -> None:
    """Tell the guard until when the lease is safe and when it ends, `on_warning` why it will end (a code of the server's,
    such as time_limit; empty: that is withdrawn), and `on_lost` why it was lost. Until it is cancelled.
    """
    async with asyncio.TaskGroup() as watching:
        watching.create_task(_watch_warnings(assignment, guarded, grace_s, on_warning))
        watching.create_task(_watch_safety(assignment, guarded))
        if assignment.lost is not None:
            on_lost(await assignment.lost.wait())


async def _watch_warnings(
    assignment: Assignment, guarded: Guarded, grace_s: float, on_warning: Callable[[str], None]
) -> None:
    notice, known = assignment.warned, None
    while notice is not None:
        if notice.ending != known:
            known = notice.ending
            if known is None:
                guarded.tell_limit(limit_of(assignment), grace_s)
            else:
                ahead_s = 0.0 if getattr(assignment.lost, "is_local", False) else _KILL_AHEAD_S
                guarded.tell_limit(on_lease_clock(known.ends_at) - ahead_s, grace_s)
            on_warning("" if known is None else known.reason)
        await notice.changed()


async def _watch_safety(assignment: Assignment, guarded: Guarded) -> None:
    ttl_s = getattr(assignment.lost, "ttl_s", None)
    while ttl_s is not None and (until := safe_until(assignment)) is not None:
        guarded.tell_safe_until(until)
        await asyncio.sleep(min(ttl_s / _UPDATES_PER_TTL, _MAX_UPDATE_INTERVAL_S))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
