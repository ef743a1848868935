"""What take-overs and nodes change in a pool. It makes no decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf
from typing import Any

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey, Node
from gpu_worker_pool.core.model.lease import ActiveLease
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
    _forget_plans(state)


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


def _forget_plans(state: PoolState) -> None:
    state.reservation, state.claims, state.no_date_until = None, {}, {}


NODE_HANDLERS: dict[type[ev.Event], Callable[[PoolState, Any], None]] = {
    ev.TakenOver: _taken_over,
    ev.NodeJoined: _node_joined,
    ev.NodeRebooted: _node_rebooted,
    ev.NodeAnnounced: _node_announced,
    ev.NodeSilenced: _node_silenced,
    ev.NodeForgotten: _node_forgotten,
}
