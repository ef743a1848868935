"""What is known of workers that failed, and the errors that tell the callers of their tasks."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpu_worker_pool.wire.endings import after_warning

from .crew import FailureCause
from .errors import ExecutorBrokenError, WorkerLostError
from .worker_process import WorkerProcess


@dataclass
class WorkerTroubles:
    """By the numbers of the workers: why a lease was lost or refused, and why a worker could not start."""

    losses: dict[int, str] = field(default_factory=dict)
    # Why the server was about to end a lease; empty where it has withdrawn that.
    notices: dict[int, str] = field(default_factory=dict)
    refusals: dict[int, Exception] = field(default_factory=dict)
    unfit: dict[int, BaseException] = field(default_factory=dict)

    def error(self, number: int, worker: WorkerProcess | None, cause: FailureCause, attempts: int) -> BaseException:
        """The error of a task that has no result."""
        if cause is FailureCause.NO_LEASE:
            return self.refusals.get(number) or WorkerLostError("no GPU was granted", attempts=attempts)
        exit_code = None if worker is None else worker.exit_code
        return WorkerLostError(self.reason(number, worker, cause), exit_code=exit_code, attempts=attempts)

    def reason(self, number: int, worker: WorkerProcess | None, cause: FailureCause) -> str:
        """Why a worker did not answer, in words."""
        if cause is FailureCause.INTERRUPTED:
            return "the executor was interrupted"
        if cause is FailureCause.LEASE_LOST:
            on = f" on GPU {', '.join(map(str, worker.gpu_ids))}" if worker is not None and worker.gpu_ids else ""
            return f"the worker's lease{on} was lost: {self.losses.get(number, 'the server did not say why')}"
        notice = self.notices.get(number)
        if cause is FailureCause.LEASES_TOO_SHORT:
            known = f"was over {after_warning(notice)}" if notice else "was lost"
            why = f": {self.losses[number]}" if number in self.losses else ""
            return f"leases end before their workers are ready; that of the last worker {known}{why}"
        ending = "the worker is gone" if worker is None else worker.ending
        if notice:
            return f"{ending} {after_warning(notice)}"
        return f"{ending}{'' if worker is None else worker.why_ended}"

    def breakage(self, number: int, worker: WorkerProcess | None, cause: FailureCause) -> ExecutorBrokenError:
        """The error of an executor none of whose workers can start."""
        if cause is FailureCause.STARTS_FAILED:
            return ExecutorBrokenError(
                f"the workers end before they are ready; of the last one, {self.reason(number, worker, cause)}. What they "
                "wrote to standard error says more"
            )
        error = self.unfit.get(number)
        broken = ExecutorBrokenError(
            f"a worker could not start, because it could not load the main module or the initializer failed: {error!r}"
        )
        broken.__cause__ = error
        return broken

    def forget(self, number: int) -> None:
        """Forget a worker whose task was told."""
        for known in (self.losses, self.notices, self.refusals, self.unfit):
            known.pop(number, None)
