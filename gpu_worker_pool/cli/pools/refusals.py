"""The failure for a server that refused what an operator asked for."""

from __future__ import annotations

from http import HTTPStatus

from gpu_worker_pool.cli.failure import FAILED, REFUSED, Failure
from gpu_worker_pool.cli.output import plain

from .report import PoolReport
from .servers import ServerAnswer


def not_found(answer: ServerAnswer, report: PoolReport) -> Failure:
    """The failure for a server that answered 404, by what kind of server it is."""
    if not report.is_up:
        return Failure(f"{answer.url} is not a GPU server ({report.error}); `gpu-pool doctor` looks closer")
    if not report.has_leases:
        return Failure(
            f"{answer.url} has statistics only, and hands out nothing that could be kept back; for leases, run "
            "`gpu-pool serve` on that machine"
        )
    return Failure(f"{plain(answer.error)} `gpu-pool status` shows what it has.", REFUSED)


def failure_of(answer: ServerAnswer, message: str) -> Failure:
    if answer.status is None:
        return Failure(f"{message}; is {answer.url} a running GPU server? `gpu-pool doctor` looks closer")
    if answer.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        message += (
            " From another machine, log in with a token that may (`gpu-pool login`), or set GPU_POOL_TOKEN to it."
        )
    return Failure(message, FAILED if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR else REFUSED)
