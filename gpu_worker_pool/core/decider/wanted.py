"""Whether a waiter would be served if a lease were released.

A holder with many short tasks keeps its lease from one to the next. Between two of them it asks, so that those that wait come
before its next task, as they would if each task had a lease of its own.
"""

from __future__ import annotations

from dataclasses import replace

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.core.model.lease import ActiveLease, EndReason, QueuedLease, Reservation
from gpu_worker_pool.core.model.slot import GpuSlot, attribute_processes, memory_use
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.serve import serve_queue
from gpu_worker_pool.core.queue.withheld import Withheld

from .evolve import replay


def wanted_by(state: PoolState, lease_id: str, now: float) -> QueuedLease | None:
    """The waiter that would be served before a new request like that of this lease, or would keep its GPUs from it, if the
    lease were released now; None if there is none.

    In a copy of the pool, the lease is released and requested again, and the queue is served. Waiters whose requests are the
    same but for their holders' processes do not count: they are for the same work.
    """
    lease, now = state.leases.get(lease_id), max(now, state.clock)
    if not isinstance(lease, ActiveLease) or not len(state.queue):
        return None
    pool = _released(state, lease, now)
    found = serve_queue(pool, now, last=lease_id)
    served = [grant.lease_id for grant in found.grants[:1]]
    claimers = [claimer for key, claimer in found.claims.items() if key in lease.gpus]
    first = [*served, *claimers, *_reserved_for(pool, lease, found.reservation, now)]
    return next((state.queued(other) for other in first if other != lease_id), None)


def _released(state: PoolState, lease: ActiveLease, now: float) -> PoolState:
    """A copy of the pool in which the lease has been released and requested again."""
    pool, wall_now = state.copied(lease), now + state.wall_offset_s
    slots = [state.slots[key] for key in lease.gpus]
    readings = [_left_by(lease.id, slot, slot.reading, state) for slot in slots if slot.reading is not None]
    ended = ev.LeaseEnded(now, lease.id, EndReason.RELEASED, (), wall_now)
    queued = ev.LeaseQueued(now, lease.id, lease.request, state.next_seq, wall_now)
    replay(pool, [ended, ev.GpusObserved(now, tuple(readings)), queued])
    own_class, own = pool.queue.class_of(lease.id), lease.request
    alike = [waiter for waiter in state.queue if pool.queue.class_of(waiter) is own_class]
    others = [(waiter, state.queued(waiter).request) for waiter in alike]
    pool.passed_over |= {
        waiter for waiter, other in others if (other.priority, other.labels) == (own.priority, own.labels)
    }
    return pool


def _left_by(lease_id: str, slot: GpuSlot, reading: Reading, state: PoolState) -> Reading:
    """What would be read of a GPU without this lease: its processes, and those that may be its own, go with it. The load is taken
    for that of the lease.
    """
    occupants, members = slot.occupants.copy(), slot.members.copy()
    del occupants[lease_id]
    members.pop(lease_id, None)
    rest, ignored = GpuSlot(slot.key, reading, occupants, members), state.ignored_processes
    both = zip(attribute_processes(slot, ignored), attribute_processes(rest, ignored), strict=True)
    own = [process for (process, before), (_, after) in both if not before.is_outside and after.is_outside]
    own_mb = sum(process.memory_mb or 0.0 for process in own)
    rest.reading = left = replace(
        reading,
        processes=reading.processes and tuple(process for process in reading.processes if process not in own),
        memory_used_mb=reading.memory_used_mb and max(reading.memory_used_mb - own_mb, 0.0),
        utilization_percent=reading.utilization_percent and 0.0,
    )
    before_it, after_it = memory_use(slot, ignored), memory_use(rest, ignored)
    if before_it is None or after_it is None or left.memory_used_mb is None:
        return left
    # Memory without an owner was taken for the lease's.
    return replace(left, memory_used_mb=left.memory_used_mb - max(after_it.outside_mb - before_it.outside_mb, 0.0))


def _reserved_for(pool: PoolState, lease: ActiveLease, reservation: Reservation | None, now: float) -> list[str]:
    """The waiter whose reservation keeps GPUs of the lease from a request like it, if there is one."""
    withheld = Withheld(pool, now)
    withheld.reservation = reservation
    reserved = withheld.reserved_from(pool.queue.class_of(lease.id))
    return [] if reservation is None or reserved.isdisjoint(lease.gpus) else [reservation.lease_id]
