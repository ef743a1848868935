"""Bodies that callers send: to request a lease, to renew leases, to drain a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from gpu_worker_pool.core.model.request import DEFAULT_TTL_S, MAX_GPUS, MAX_PRIORITY, MAX_TTL_S

from .bounds import (
    MAX_MEMORY_MB,
    MAX_MODEL,
    MAX_PID,
    MAX_REASON,
    MAX_TEXT,
    MAX_WAIT_S,
    MIN_TTL_S,
    Note,
    Printable,
    Range,
)

Text = Annotated[str | None, Printable(MAX_TEXT)]
Percent = Annotated[float | None, Range(0, 100)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseForm:
    """What is asked for, and who asks. Everything may be left out."""

    gpus: Annotated[int, Range(1, MAX_GPUS), Note("How many, all on this node, all or nothing.")] = 1
    memory_mb: Annotated[
        float | None,
        Range(1, MAX_MEMORY_MB),
        Note("Share each GPU and use this much of it; without it, it is exclusive."),
    ] = None
    model: Annotated[str | None, Printable(MAX_MODEL), Note("A word of the GPU's name, or a pattern: *A100*.")] = None
    among: Annotated[
        tuple[str, ...] | None,
        Note("Only these GPUs: indices as nvidia-smi has them, UUIDs, or unambiguous beginnings of UUIDs."),
    ] = None
    priority: Annotated[int, Range(-MAX_PRIORITY, MAX_PRIORITY), Note("Higher is served first.")] = 0
    ttl_s: Annotated[float, Range(MIN_TTL_S, MAX_TTL_S), Note("Ends after so long without a sign of life.")] = (
        DEFAULT_TTL_S
    )
    wait_s: Annotated[float, Range(0, MAX_WAIT_S), Note("How long the answer may be held back while queued.")] = 0.0
    memory_threshold_percent: Percent = None
    utilization_threshold_percent: Percent = None
    worker_id: Text = None
    owner: Text = None
    host: Text = None
    pid: Annotated[int | None, Range(1, MAX_PID)] = None
    pid_started: Annotated[
        float | None, Range(0, 1e15), Note("In clock ticks since the machine was started, as /proc has it.")
    ] = None
    boot_id: Text = None
    pid_namespace: Text = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewForm:
    """The leases that are renewed."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainForm:
    """Why a GPU is taken out of service."""

    reason: Annotated[str, Printable(MAX_REASON)] = ""
