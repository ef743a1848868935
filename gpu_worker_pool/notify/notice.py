"""What hooks are told: one thing that happened to a lease or to a node."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import EndReason


class Occasion(StrEnum):
    GRANTED = "granted"
    LOST = "lost"
    """The lease ended, and its holder had not given it back."""
    ENDED = "ended"
    """The lease ended, however that came about."""
    IDLE = "idle"
    """The GPUs of the lease compute nothing for some time."""
    PREEMPTED = "preempted"
    """The lease will be ended for another request, after a grace time."""
    TIME_LIMIT = "time_limit"
    """The lease will be ended soon, because its time is over."""
    NODE_UNKNOWN = "node_unknown"
    """Nothing is heard of a node any more, or its GPUs cannot be read."""


@dataclass(frozen=True, slots=True)
class Notice:
    """`at` is a wall-clock time. What does not apply is None: a node has no owner. `job` and `exit_code` are known of the
    commands of `gpu-pool run` and `submit`.
    """

    occasion: Occasion
    at: float
    lease_id: str | None = None
    owner: str | None = None
    gpus: tuple[GpuKey, ...] = ()
    node: str | None = None
    reason: str | None = None
    by: str | None = None
    why: str | None = None
    ends_at: float | None = None
    labels: tuple[tuple[str, str], ...] = ()
    job: str | None = None
    exit_code: int | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that it concerns."""
        return (self.node,) if self.node is not None else tuple(dict.fromkeys(key.node for key in self.gpus))


# Ends that the holder knows of: it gave the lease back, or withdrew its request.
_OWN_ENDS = frozenset({EndReason.RELEASED, EndReason.CANCELLED})
_WARNED = {
    EndReason.PREEMPTED: Occasion.PREEMPTED,
    EndReason.TIME_LIMIT: Occasion.TIME_LIMIT,
    EndReason.IDLE: Occasion.IDLE,
}


def ends(reason: EndReason, by: str | None, *, was_granted: bool) -> tuple[Occasion, ...]:
    """The occasions that the end of a lease is. A request that was never granted is none."""
    if not was_granted:
        return ()
    is_own = reason in _OWN_ENDS and by is None
    return (Occasion.ENDED,) if is_own else (Occasion.LOST, Occasion.ENDED)


def warns(reason: EndReason | None) -> Occasion | None:
    """The occasion that a warning is; None if it is withdrawn."""
    return None if reason is None else _WARNED.get(reason)
