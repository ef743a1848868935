"""Bodies that callers send: to request a lease, to renew leases, to drain or book GPUs, to set a quota."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from gpu_worker_pool.core.model.bounds import DEFAULT_TTL_S, MAX_TTL_S
from gpu_worker_pool.core.model.configured import MAX_QUOTA, MAX_WEIGHT
from gpu_worker_pool.core.model.request import MAX_GPUS, MAX_NODES, MAX_PRIORITY, MAX_TIME_LIMIT_S

from .bounds import (
    MAX_MEMORY_MB,
    MAX_MODEL,
    MAX_PID,
    MAX_REASON,
    MAX_RENEW_WAIT_S,
    MAX_TEXT,
    MAX_TIME,
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
    """A request for a lease, and its holder. Every field may be left out."""

    gpus: Annotated[int, Range(1, MAX_GPUS), Note("Number of GPUs, all on this node, all or nothing.")] = 1
    memory_mb: Annotated[
        float | None,
        Range(1, MAX_MEMORY_MB),
        Note("Memory for this lease on each GPU, which is then shared; without it, the GPU is exclusive."),
    ] = None
    model: Annotated[str | None, Printable(MAX_MODEL), Note("A word of the GPU's name, or a pattern: *A100*.")] = None
    among: Annotated[
        tuple[str, ...] | None,
        Note("Only these GPUs: indices as nvidia-smi shows them, UUIDs, or unambiguous beginnings of UUIDs."),
    ] = None
    priority: Annotated[int, Range(-MAX_PRIORITY, MAX_PRIORITY), Note("Higher is served first.")] = 0
    ttl_s: Annotated[
        float, Range(MIN_TTL_S, MAX_TTL_S), Note("The lease expires after so long without a heartbeat.")
    ] = DEFAULT_TTL_S
    wait_s: Annotated[
        float, Range(0, MAX_WAIT_S), Note("How long the server may hold back the answer while the request is queued.")
    ] = 0.0
    memory_threshold_percent: Percent = None
    utilization_threshold_percent: Percent = None
    worker_id: Text = None
    owner: Text = None
    host: Text = None
    pid: Annotated[int | None, Range(1, MAX_PID)] = None
    pid_started: Annotated[
        float | None, Range(0, 1e15), Note("Start time of the process in clock ticks since boot, as in /proc.")
    ] = None
    boot_id: Text = None
    pid_namespace: Text = None
    labels: Mapping[str, str] = field(default_factory=dict)
    time_limit_s: Annotated[
        float | None,
        Range(1, MAX_TIME_LIMIT_S),
        Note("The lease ends so long after its grant. With it, GPUs may be had that are reserved for later."),
    ] = None
    preemptible: Annotated[
        bool, Note("Whether the lease may be ended, after a warning, when another request needs its GPUs.")
    ] = False
    nodes: Annotated[
        int, Range(1, MAX_NODES), Note("`gpus` on each of so many nodes, all or nothing; more than 1 only of a fleet.")
    ] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewForm:
    """The leases to renew."""

    ids: tuple[str, ...]
    wait_s: Annotated[
        float,
        Range(0, MAX_RENEW_WAIT_S),
        Note("How long to hold back the answer while none of the leases has ended or been warned."),
    ] = 0.0
    warned: Annotated[
        tuple[str, ...], Note("Of these leases the caller knows the warning; only a change of it is told at once.")
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainForm:
    """The reason for taking a GPU out of service, and from when on."""

    reason: Annotated[str, Printable(MAX_REASON)] = ""
    at: Annotated[str | None, Printable(MAX_TIME), Note("ISO 8601, or seconds since 1970; without it, now.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BookingForm:
    """GPUs to keep for an owner in a span of time. Without `among` the server chooses them."""

    gpus: Annotated[int, Range(1, MAX_GPUS), Note("Number of GPUs, all on this node.")] = 1
    model: Annotated[str | None, Printable(MAX_MODEL)] = None
    among: tuple[str, ...] | None = None
    starts_at: Annotated[str, Printable(MAX_TIME), Note("ISO 8601, or seconds since 1970, as a string.")]
    ends_at: Annotated[str, Printable(MAX_TIME), Note("ISO 8601, or seconds since 1970, as a string.")]
    owner: Annotated[str | None, Printable(MAX_TEXT), Note("For whom; without it, the caller.")] = None
    reason: Annotated[str, Printable(MAX_REASON)] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaForm:
    """What an owner may use. Fields that are left out, or null, have no limit."""

    gpus: Annotated[
        int | None,
        Range(0, MAX_QUOTA),
        Note("The owner never has more GPUs than this; preemptible leases do not count."),
    ] = None
    weight: Annotated[float, Range(0.001, MAX_WEIGHT), Note("The owner's part in a fair share.")] = 1.0
    max_priority: Annotated[int | None, Range(-MAX_PRIORITY, MAX_PRIORITY)] = None
    max_time_limit_s: Annotated[float | None, Range(1, MAX_TIME_LIMIT_S)] = None
    max_queued: Annotated[
        int | None, Range(0, MAX_QUOTA), Note("So many requests may wait. To keep an owner out, set gpus to 0.")
    ] = None
