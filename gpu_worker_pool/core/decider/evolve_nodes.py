"""What take-overs, nodes and readings of GPUs change in a pool. It makes no decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf
from typing import Any

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey, Node, Reading
from gpu_worker_pool.core.model.lease import ActiveLease, LeaseUse
from gpu_worker_pool.core.model.slot import GpuSlot
from gpu_worker_pool.core.model.state import PoolState


def _taken_over(state: PoolState, event: ev.TakenOver) -> None:
    state.taken_over, state.lost_s = event.at, 0.0
    state.epoch, state.boot_id = event.epoch, event.boot_id
    state.clock_base, state.wall_offset_s = event.clock_base, event.wall_offset_s
    state.announced.clear()
    _void_readings(state, state.slots.values())
    for slot in state.slots.values():
        for lease_id, occupant in slot.occupants.items():
            # What is read from here on is read after its grant.
            slot.occupants[lease_id] = replace(occupant, since=-inf)
    for lease in state.leases.values():
        state.restart_ttl(lease, event.at)
    # No waiter has called this driver yet. Which grants were taken up is not written, so all count as taken up.
    state.passed_over.clear()
    state.away = set(state.queue)
    state.reservation, state.claims = None, {}


def _node_joined(state: PoolState, event: ev.NodeJoined) -> None:
    known = state.nodes.get(event.node)
    state.nodes[event.node] = Node(event.boot_id, event.gpus, event.machine_id)
    new = {GpuKey(event.node, gpu.uuid): gpu for gpu in event.gpus or ()}
    for gpu in (known.gpus or ()) if known else ():
        key = GpuKey(event.node, gpu.uuid)
        if key not in new:
            state.slots[key].installed = None
            _void_readings(state, [state.slots[key]])
    for key, gpu in new.items():
        state.slot(key).installed = gpu
    state.touch(new)


def _node_rebooted(state: PoolState, event: ev.NodeRebooted) -> None:
    state.nodes[event.node] = replace(state.nodes[event.node], boot_id=event.boot_id)
    _void_readings_of(state, event.node)
    for lease in state.leases.values():
        if isinstance(lease, ActiveLease) and any(key.node == event.node for key in lease.gpus):
            state.restart_ttl(lease, event.at)


def _node_announced(state: PoolState, event: ev.NodeAnnounced) -> None:
    state.announced.add(event.node)
    if event.fence_seen:
        state.fences[event.node] = max(state.fences.get(event.node, 0), event.fence_seen)


def _node_silenced(state: PoolState, event: ev.NodeSilenced) -> None:
    state.announced.discard(event.node)
    _void_readings_of(state, event.node)


def _node_forgotten(state: PoolState, event: ev.NodeForgotten) -> None:
    for gpu in state.nodes.pop(event.node).gpus or ():
        slot = state.slots[GpuKey(event.node, gpu.uuid)]
        slot.installed = None
        _void_readings(state, [slot])
    for key in [key for key in state.excluded if key.node == event.node]:
        del state.excluded[key]


def _void_readings_of(state: PoolState, node: str) -> None:
    # A GPU that was read is in the inventory of its node. A fleet has many others, so they are not gone through.
    _void_readings(state, [state.slots[GpuKey(node, gpu.uuid)] for gpu in state.nodes[node].gpus or ()])


def _void_readings(state: PoolState, slots: Iterable[GpuSlot]) -> None:
    for slot in list(slots):
        slot.reading = slot.busy = None
        state.touch((slot.key,))
        state.forget_slot_if_unknown(slot)


def _processes_attributed(state: PoolState, event: ev.ProcessesAttributed) -> None:
    members = state.slot(event.gpu).members
    if event.processes:
        members[event.lease_id] = event.processes
    else:
        members.pop(event.lease_id, None)
    state.touch((event.gpu,))


def _gpus_observed(state: PoolState, event: ev.GpusObserved) -> None:
    for reading in event.readings:
        slot = state.slot(reading.gpu.key)
        known = slot.reading
        was_away = known is None or reading.at - known.at > state.settings.stale_after_s
        if not slot.is_read_as(reading):
            state.touched.add(slot.key)
        if known is None or event.at - known.at > state.settings.stale_after_s:
            state.unsettle()
        elif not state.preemptible.isdisjoint(slot.occupants) and known.use != reading.use:
            state.unsettle()  # a waiter may have it, or no longer, if the leases there end
        slot.reading = reading
        # Unknown is not idle. What it did while it was not read is unknown, too.
        load_percent = reading.load_percent
        is_busy = load_percent is None or load_percent >= state.settings.computing_percent
        if slot.busy is None:
            slot.busy = event.at
        elif is_busy or was_away:
            slot.busy = max(reading.at, slot.busy)
    _measure(state, {reading.gpu.key for reading in event.readings}, event.at)


def _measure(state: PoolState, read: set[GpuKey], at: float) -> None:
    """Add what these GPUs were just read to do to the use of their leases."""
    for lease_id in {lease_id for key in read for lease_id in state.slots[key].occupants}:
        lease = state.leases[lease_id]
        if not isinstance(lease, ActiveLease):
            continue
        use = state.lease_uses.get(lease_id, LeaseUse(lease_id))
        use = _with_last_readings(use, lease, state, read)
        if use.is_known:
            if not state.lease_uses:
                state.measured = at
            state.lease_uses[lease_id] = use


def _with_last_readings(use: LeaseUse, lease: ActiveLease, state: PoolState, read: set[GpuKey]) -> LeaseUse:
    """With the memory of the last readings, if that is known of all its GPUs, and the utilization of those that were just
    `read`. Of a shared GPU it is not known who computes. A reading counts if it began after the grant.
    """
    slots = [state.slots[key] for key in lease.gpus]
    of_it = [
        (each.reading, each) for each in slots if each.reading and each.reading.at > each.occupants[lease.id].since
    ]
    parts = [_memory_mb(slot, reading, lease.id) for reading, slot in of_it]
    if len(parts) == len(slots) and None not in parts:
        use = use._replace(peak_memory_mb=max(use.peak_memory_mb or 0.0, sum(part or 0.0 for part in parts)))
    if lease.request.wishes.is_shared:
        return use
    loads = [reading.utilization_percent for reading, slot in of_it if slot.key in read]
    seen = [load for load in loads if load is not None]
    return use._replace(utilization_sum=use.utilization_sum + sum(seen), samples=use.samples + len(seen))


def _memory_mb(slot: GpuSlot, reading: Reading, lease_id: str) -> float | None:
    """The memory of a GPU that is the lease's alone; else that of the lease's processes, if all of them are known."""
    occupant = slot.occupants[lease_id]
    if occupant.asked_mb is None:
        return reading.memory_used_mb
    if reading.processes is None or (occupant.process is None and lease_id not in slot.members):
        return None
    members = slot.attribute(reading.processes)[lease_id]
    own = [process.memory_mb for process in reading.processes if process.id in members]
    return None if None in own else sum(each or 0.0 for each in own)


def _leases_measured(state: PoolState, event: ev.LeasesMeasured) -> None:
    state.measured = event.at
    state.lease_uses.update((use.lease_id, use) for use in event.uses if use.lease_id in state.leases)


NODE_HANDLERS: dict[type[ev.Event], Callable[[PoolState, Any], None]] = {
    ev.TakenOver: _taken_over,
    ev.NodeJoined: _node_joined,
    ev.NodeRebooted: _node_rebooted,
    ev.NodeAnnounced: _node_announced,
    ev.NodeSilenced: _node_silenced,
    ev.NodeForgotten: _node_forgotten,
    ev.ProcessesAttributed: _processes_attributed,
    ev.GpusObserved: _gpus_observed,
    ev.LeasesMeasured: _leases_measured,
}
