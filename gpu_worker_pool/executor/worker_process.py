"""The worker of a GPUExecutor as its crew sees it: a lease, the guard that holds it, and a process under that guard, which is
the only one of a ProcessPoolExecutor.

host/guard.py says what a guard does. It lives as long as any process that the worker has started, so the GPU of a worker
is not granted to others while one of them still uses it, however the worker, its executor or a task of it ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from gpu_worker_pool.client.local_client import LocalClient
from gpu_worker_pool.client.options import RequestWishes
from gpu_worker_pool.failure import Failure
from gpu_worker_pool.host.guarded import GuardDied, Guarded
from gpu_worker_pool.jobs.supervise import SupervisedCommand, supervise
from gpu_worker_pool.models import Assignment, LeaseEnding
from gpu_worker_pool.wire.leases import after_warning

from . import worker as program
from .errors import ending_of
from .spawning import pool_of_one, worker_command
from .tasks import Task, travelled

# A worker gets SIGTERM at most half of its time before the end of its lease: the rest is for tasks.
_GRACE_PARTS: Final = 2
# For a worker that must end at once: enough for a handler of SIGTERM that only removes a file.
_LEAST_GRACE_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """`max_workers`: None: as many as there are GPUs for. `retries`: how often a task is repeated whose worker died or lost
    its lease. `idle_release_s`: how long a worker without a task keeps its lease. `max_tasks`: after this many tasks a
    worker is replaced; None: never. `wishes`, `client` and `lease_timeout_s` are for the leases.
    """

    max_workers: int | None
    retries: int
    idle_release_s: float
    max_tasks: int | None
    wishes: RequestWishes
    client: LocalClient
    lease_timeout_s: float | None
    grace_s: float
    initializer: Callable[..., object] | None
    initargs: tuple[Any, ...]


class Phase(Enum):
    """Where a worker is in its life."""

    REQUESTING = auto()
    STARTING = auto()
    IDLE = auto()
    BUSY = auto()
    # It gets no more tasks. It may still answer the one that it has.
    LEAVING = auto()


class Worker:
    """A worker, from the request for its lease until that is released. It begins with the guard alone, in whose name the
    lease is requested.
    """

    def __init__(self, main: Mapping[str, Any], options: WorkerOptions) -> None:
        self._line, self._theirs = socket.socketpair()
        try:
            self._pool = pool_of_one(self._line, main, options.initializer, options.initargs)
            self.guarded = Guarded.start(grace_parts=_GRACE_PARTS)
        except BaseException:
            self._line.close()
            self._theirs.close()
            raise
        self._closing: asyncio.Future[None] | None = None
        self._grace_s = options.grace_s
        self.phase = Phase.REQUESTING
        # The one that it has not answered.
        self.task: Task | None = None
        self.tasks_done = 0
        # What it does next, while it is idle: a task, or None if it leaves.
        self.given: asyncio.Future[Task | None] = asyncio.get_running_loop().create_future()
        # Whether it could ever do a task, and whether it left because its crew did not want it.
        self.was_ready = False
        self.is_unwanted = False
        # Why its lease is about to end, a code of the server's, and why it was lost.
        self.notice = ""
        self.loss: str | None = None
        # Why it has ended; `cause`: if not by its own fault.
        self.cause: str | None = None
        self.exit_code: int | None = None
        self._ending = "has not ended"
        self._pid: int | None = None
        self._gpus = ""

    @property
    def reason(self) -> str:
        """Why it has not answered, in words: `worker 12345 on GPU 2 was killed by SIGKILL`."""
        return (
            self.cause or f"{'the worker' if self._pid is None else f'worker {self._pid}'}{self._gpus} {self._ending}"
        )

    @property
    def is_guard_gone(self) -> bool:
        """Whether the holder of the lease was killed before it had a command."""
        try:
            return os.waitid(os.P_PID, self.guarded.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    # --- its process -----------------------------------------------------------------------------------------------------

    async def run(
        self, assignment: Assignment, warn: Callable[[LeaseEnding | None], None], lose: Callable[[], None]
    ) -> None:
        """Run its process on the lease until nothing of it is left."""
        self._gpus = f" on GPU {', '.join(map(str, assignment.gpu_ids))}"

        def note_loss(reason: str) -> None:
            self.loss = reason
            self.cause = self.cause or f"the worker's lease{self._gpus} was lost: {reason}"
            lose()

        with open(os.devnull, "wb") as nothing:  # noqa: ASYNC230, PTH123 - quick
            output, errors = (number if _is_open(number) else nothing.fileno() for number in (1, 2))
            command = SupervisedCommand(
                argv=worker_command(),
                env=os.environ,
                streams=(self._theirs.fileno(), output, errors),
                grace_s=self._grace_s,
                finishes_work=True,
            )
            try:
                outcome = await supervise(
                    self.guarded,
                    assignment,
                    command,
                    on_started=self._theirs.close,
                    on_warning=warn,
                    on_lost=note_loss,
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

    async def prepare(self) -> BaseException | None:
        """Send the process what it needs to start, and wait for its first answer: why it can do no task; None: it can.
        BrokenProcessPool where it has ended.
        """
        try:
            first = await asyncio.to_thread(self._pool.submit, program.answer_first)
            pid, failure = await asyncio.wrap_future(first)
        except (BrokenProcessPool, ConnectionError) as error:
            raise BrokenProcessPool("it has ended") from error
        except Exception as error:  # noqa: BLE001 - the initializer's own __reduce__
            self._line.shutdown(socket.SHUT_WR)  # the process ends, which waits for what it needs
            return error
        self._pid = pid
        return None if failure is None else travelled(failure)

    def send(self, task: Task) -> Future[tuple[bool, bytes]]:
        """Send it a task. BrokenProcessPool where it has ended, and the task has certainly not begun."""
        answer = self._pool.submit(program.run, task.call)
        self.task = task
        task.attempts += 1
        self.tasks_done += 1
        return answer

    # --- its end ---------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Let the process end once it has no task. It is told to end after its grace."""
        self.phase = Phase.LEAVING
        if not self.given.done():
            self.given.set_result(None)
        if self._closing is None:
            self.close_pool()
            asyncio.get_running_loop().call_later(self._grace_s, self.guarded.end, self._grace_s)

    def close_pool(self) -> asyncio.Future[None]:
        """Accept no more tasks; done when the process has ended, and all that it answered was taken in."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().run_in_executor(None, self._pool.shutdown)
        return self._closing

    def interrupt(self, cause: str, *, is_again: bool) -> None:
        """End it as Ctrl-C does; with hardly any grace if `is_again`."""
        self.cause, self.is_unwanted = self.cause or cause, True
        if is_again:
            self.guarded.end(min(self._grace_s, _LEAST_GRACE_S))
        elif self.phase is Phase.BUSY:
            self.guarded.send_signal(signal.SIGINT)
        elif self.phase is Phase.STARTING:
            self.guarded.end(self._grace_s)
        self.leave()

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
