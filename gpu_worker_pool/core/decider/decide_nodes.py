"""Decisions about take-overs and nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import InventoryGpu, Reading
from gpu_worker_pool.core.model.lease import ActiveLease, DrainingLease, EndReason
from gpu_worker_pool.core.model.state import PoolState

from .lease_ends import all_ended


def take_over(_: PoolState, command: cmd.TakeOver, now: float) -> list[ev.Event]:
    return [ev.TakenOver(now, command.epoch, command.boot_id, command.clock_base, command.wall_offset_s)]


def announce_node(state: PoolState, command: cmd.AnnounceNode, now: float) -> list[ev.Event]:
    known = state.nodes.get(command.node)
    gpus = (known.gpus if known else None) if command.gpus is None else _in_order(command.gpus)
    events: list[ev.Event] = []
    if known is not None and known.boot_id != command.boot_id:
        events += [ev.NodeRebooted(now, command.node, command.boot_id), *_ended_by_reboot(state, command.node, now)]
    machine_id = (known.machine_id if known else None) if command.machine_id is None else command.machine_id
    if known is None or (known.gpus, known.machine_id) != (gpus, machine_id):
        events.append(ev.NodeJoined(now, command.node, command.boot_id, gpus, machine_id))
    if command.node not in state.announced:
        events.append(ev.NodeAnnounced(now, command.node, command.fence_seen))
    return events


def silence_node(state: PoolState, command: cmd.SilenceNode, now: float) -> list[ev.Event]:
    return [ev.NodeSilenced(now, command.node)] if command.node in state.announced else []


def forget_node(state: PoolState, command: cmd.ForgetNode, now: float) -> list[ev.Event]:
    node = command.node
    if node not in state.nodes:
        return [ev.NodeNotForgotten(now, node, f"no node {node} is known")]
    if node in state.announced:
        return [ev.NodeNotForgotten(now, node, f"{node} is connected; stop its server first")]
    events: list[ev.Event] = []
    over: dict[str, ev.LeaseEnded] = {}
    for _, lease in sorted(state.leases.items()):
        if isinstance(lease, DrainingLease):
            events += [ev.GpuDrained(now, lease.id, key) for key in lease.gpus if key.node == node]
        elif isinstance(lease, ActiveLease) and any(key.node == node for key in lease.gpus):
            for ended in all_ended(state, lease, EndReason.REVOKED, now):
                draining = tuple(key for key in ended.draining if key.node != node)
                over.setdefault(ended.lease_id, replace(ended, draining=draining, by=command.by))
    return [*events, *over.values(), ev.NodeForgotten(now, node)]


def _ended_by_reboot(state: PoolState, node: str, now: float) -> list[ev.Event]:
    """No process from before is alive on this node, and none holds memory on its GPUs."""
    events: list[ev.Event] = []
    over: dict[str, ev.LeaseEnded] = {}
    # Sorted, so that the same leases are remembered however the history was told.
    for _, lease in sorted(state.leases.items()):
        if isinstance(lease, DrainingLease):
            events += [ev.GpuDrained(now, lease.id, key) for key in lease.gpus if key.node == node]
        elif lease.request.holder.process_on(node) is not None:
            for ended in all_ended(state, lease, EndReason.HOLDER_DIED, now):
                draining = tuple(key for key in ended.draining if key.node != node)
                over.setdefault(ended.lease_id, replace(ended, draining=draining))
    return [*events, *over.values()]


def rename_node(state: PoolState, command: cmd.RenameNode, now: float) -> list[ev.Event]:
    """Nothing happens to a node that is not known, nor if the new name is another node's."""
    if command.old not in state.nodes or command.new in state.nodes:
        return []
    return [ev.NodeRenamed(now, command.old, command.new)]


def joined_by(state: PoolState, readings: Iterable[Reading], now: float) -> list[ev.NodeJoined]:
    """The inventories that these readings change."""
    changed: dict[str, dict[str, InventoryGpu]] = {}
    for reading in readings:
        gpu, slot = reading.gpu, state.slots.get(reading.gpu.key)
        known = slot.installed if slot else None
        total_mb = reading.memory_total_mb
        if total_mb is None and known is not None:
            total_mb = known.memory_total_mb  # unknown now, which is not another size
        if known is None or (known.index, known.name, known.memory_total_mb) != (gpu.index, gpu.name, total_mb):
            seen = InventoryGpu(gpu.key.uuid, gpu.index, gpu.name, total_mb)
            inventory = {each.uuid: each for each in state.nodes[gpu.key.node].gpus or ()}
            changed.setdefault(gpu.key.node, inventory)[seen.uuid] = seen
    return [
        ev.NodeJoined(now, node, state.nodes[node].boot_id, _in_order(inventory.values()), state.nodes[node].machine_id)
        for node, inventory in changed.items()
    ]


def _in_order(gpus: Iterable[InventoryGpu]) -> tuple[InventoryGpu, ...]:
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    return tuple(sorted(by_uuid.values(), key=lambda gpu: (gpu.index, gpu.uuid)))
