"""A GPU may go to the process that uses it already.

A program with several workers releases a GPU and asks for one again, while its memory stays allocated: frameworks keep
what they once allocated. For all other processes that GPU drains, and after the drain limit it is in use outside the
pool; for the same process it is usable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace

from gpu_worker_pool.core.model.gpu import GpuKey, ProcessId
from gpu_worker_pool.core.model.outsiders import outside_use
from gpu_worker_pool.core.model.slot import GpuSlot
from gpu_worker_pool.core.model.state import PoolState

from .eligibility import is_suitable, judge
from .keeps import why_kept
from .placement import Grant
from .quotas import obstacle
from .verdicts import Eligible
from .waiting import QueueKey

# Waiters considered per process: more than one process has workers.
MOST_WAITERS = 64


def reclaim(state: PoolState, now: float) -> Grant | None:
    """The first waiter that can have a GPU on which only its own process has left memory."""
    used_outside_by = state.capacity.used_outside_by
    for process in (*state.reclaimable, *_in_both(used_outside_by, state.queue.processes)):
        keys = {*state.reclaimable.get(process, ()), *used_outside_by.get(process, ())}
        for queue_key in state.queue.of_process(process)[:MOST_WAITERS]:
            for key in sorted(keys):
                if _may_reclaim(state, queue_key, key, process, now):
                    return Grant(queue_key[-1], (key,))
    return None


def _in_both(some: Collection[ProcessId], others: Collection[ProcessId]) -> Iterator[ProcessId]:
    fewer, more = sorted((some, others), key=len)
    return (process for process in fewer if process in more)


def _may_reclaim(state: PoolState, queue_key: QueueKey, key: GpuKey, process: ProcessId, now: float) -> bool:
    waiter = state.queued(queue_key[-1]).request
    wishes, owner = waiter.wishes, waiter.holder.owner
    slot = state.slots[key]
    if waiter.holder.process_on(key.node) is None:
        return False  # a process of another node with the same pid
    released = state.reclaimable.get(process, {}).get(key, ())
    if wishes.total_gpus != 1 or any(
        # A lease of another process, an active lease or a revoked one blocks every waiter.
        lease_id not in released
        # A client may claim any pid; that must not give it what another owner left.
        or state.leases[lease_id].request.holder.owner != owner
        for lease_id in slot.occupants
    ):
        return False
    if slot.occupants:
        cleared = _without(slot, {member for members in slot.members.values() for member in members})
    else:
        use = outside_use(slot, state.settings, state.ignored_processes)
        if use is None or any(None not in (found.user, owner) and found.user != owner for found in use.processes):
            return False
        cleared = _without(slot, {found.id for found in use.processes})
    lease = state.queued(queue_key[-1])
    if obstacle(state, state.queue.line_of(lease)) is not None or why_kept(state, key, lease, now) is not None:
        return False
    if not isinstance(judge(state, cleared, wishes, now), Eligible):
        return False
    # A waiter ahead that needs such a GPU must not be overtaken forever by a process that keeps it warm.
    return len(state.queue) == 1 or not any(
        keys[0] < queue_key and is_suitable(state, cleared, ahead.wishes) for ahead, keys in state.queue.lines.items()
    )


def _without(slot: GpuSlot, own: AbstractSet[ProcessId]) -> GpuSlot:
    """The GPU without its leases and these processes."""
    reading = slot.reading
    if reading is None or reading.processes is None or not own:
        return GpuSlot(slot.key, reading)
    others = tuple(found for found in reading.processes if found.id not in own)
    own_mb = sum(found.memory_mb or 0.0 for found in reading.processes if found.id in own)
    return GpuSlot(
        slot.key,
        replace(
            reading,
            processes=others,
            memory_used_mb=None if reading.memory_used_mb is None else max(reading.memory_used_mb - own_mb, 0.0),
            # With no other process on the GPU, the load is the waiter's own.
            utilization_percent=reading.utilization_percent if others or not own else 0.0,
        ),
    )
