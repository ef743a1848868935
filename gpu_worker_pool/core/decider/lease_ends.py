"""The ends of leases, as events."""

from __future__ import annotations

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import ActiveLease, EndReason, QueuedLease
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.sub_leases import leases_inside


def all_ended(  # noqa: PLR0917 - as the event
    state: PoolState,
    lease: QueuedLease | ActiveLease,
    reason: EndReason,
    now: float,
    by: str | None = None,
    why: str | None = None,
) -> list[ev.LeaseEnded]:
    """The end of a lease, after that of the leases inside it: these end with it, for its reason."""
    inside = leases_inside(state, lease.id) if state.inside else ()
    return [_ended(state, each, reason, now, by, why) for each in (*inside, lease)]


def _ended(  # noqa: PLR0917 - private
    state: PoolState,
    lease: QueuedLease | ActiveLease,
    reason: EndReason,
    now: float,
    by: str | None,
    why: str | None,
) -> ev.LeaseEnded:
    # The GPUs of a lease inside another stay the other's, whose draining covers the processes of both.
    gpus = lease.gpus if isinstance(lease, ActiveLease) and lease.request.parent is None else ()
    if state.settings.awaits_reading_after_release:
        draining = gpus
    else:
        draining = tuple(key for key in gpus if state.slots[key].members.get(lease.id))
    return ev.LeaseEnded(now, lease.id, reason, draining, now + state.wall_offset_s, by, why)
