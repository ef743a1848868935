"""The errors of an executor: a worker that is lost, an executor that can do no task, an exception that cannot travel."""

from __future__ import annotations

import signal
from concurrent.futures.process import BrokenProcessPool

from gpu_worker_pool.errors import PoolError


class WorkerLostError(PoolError, BrokenProcessPool):
    """The worker died or lost its lease while it had the task. The executor goes on with its other tasks.

    `exit_code` is that of the worker's process, negative for the signal that killed it; None if it is not known.
    `attempts` is how often the task was begun. It is a BrokenProcessPool for programs that know ProcessPoolExecutor.
    """

    def __init__(self, reason: str, *, exit_code: int | None = None, attempts: int = 1) -> None:
        self.reason = reason
        self.exit_code = exit_code
        self.attempts = attempts
        times = f" The task was begun {attempts} times." if attempts else " The task was not begun."
        tried = "" if attempts == 1 else times
        super().__init__(
            f"{reason.rstrip('. ')}; the task has no result.{tried} Submit it again, or have such tasks repeated (retries=)"
        )


class ExecutorBrokenError(PoolError, BrokenProcessPool):
    """No worker can do a task: the initializer failed, the program cannot be loaded, or every worker dies at its start."""


class RemoteTaskError(PoolError):
    """The task raised an exception that cannot be passed on. The message and the cause show it."""


def ending_of(exit_code: int) -> str:
    """`was killed by SIGKILL`, for the exit code of a process as subprocess has it."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def cannot_start(error: BaseException) -> ExecutorBrokenError:
    """For a worker that is told this error when it starts."""
    broken = ExecutorBrokenError(
        f"a worker could not start, because it could not load the main module or the initializer failed: {error!r}"
    )
    broken.__cause__ = error
    return broken
