"""Jobs for the tests of their lives."""

from __future__ import annotations

from typing import Any

from gpu_worker_pool.jobs.job_key import JobKey
from gpu_worker_pool.jobs.life import (
    GuardFacts,
    JobEvent,
    JobLife,
    JobRequested,
    JobState,
    JobTerms,
    RunEnded,
    RunLease,
    RunStarted,
    evolve,
)

GUARD = GuardFacts(pid=4711, started=5.0, boot_id="boot", pid_namespace="ns", address="guard-1")
LEASE = RunLease(id="lease", url="http://box:8000", gpus=(0,), uuids=("GPU-0",), is_local=True, ttl_s=60.0)
STARTED = RunStarted(at=2.0, guard=GUARD, lease=LEASE)


def job(number: int, index: int | None = None, state: JobState = JobState.SUBMITTED, **terms: Any) -> JobLife:
    """A job in this state."""
    made = JobTerms(JobKey(number, index), **terms)
    return JobLife(made, state)


def after(life: JobLife, *events: JobEvent) -> JobLife:
    for event in events:
        life = evolve(life, event)
    return life


def running(number: int = 1, **terms: Any) -> JobLife:
    return after(job(number, **terms), JobRequested(at=1.0), STARTED)


def failed(number: int = 1, **terms: Any) -> JobLife:
    return after(running(number, **terms), RunEnded(at=3.0, becomes=JobState.FAILED, exit_code=1))
