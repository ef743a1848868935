"""Decisions about take-overs and nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.events import RefusalCode, Refused
from gpu_worker_pool.core.model.gpu import InventoryGpu, Reading
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease, EndReason, LeaseUse, QueuedLease
from gpu_worker_pool.core.model.state import PoolState


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
        return [Refused(now, RefusalCode.NODE_STAYS, node, f"no node {node} is known")]
    if node in state.announced:
        return [Refused(now, RefusalCode.NODE_STAYS, node, f"{node} is connected; stop its server first")]
    gone = [lease for lease in _live(state) if isinstance(lease, ActiveLease) and _is_on(lease, node)]
    ends = [_off_node(ended_lease(state, lease, EndReason.REVOKED, now, command.by), node) for lease in gone]
    return [*_drained(state, node, now), *ends, ev.NodeForgotten(now, node)]


def _ended_by_reboot(state: PoolState, node: str, now: float) -> list[ev.Event]:
    """No process from before is alive on this node, and none holds memory on its GPUs."""
    gone = [lease for lease in _live(state) if lease.request.holder.process_on(node) is not None]
    ends = [_off_node(ended_lease(state, lease, EndReason.HOLDER_DIED, now), node) for lease in gone]
    return [*_drained(state, node, now), *ends]


def ended_lease(  # noqa: PLR0917 - as the event
    state: PoolState,
    lease: QueuedLease | ActiveLease,
    reason: EndReason,
    now: float,
    by: str | None = None,
    why: str | None = None,
) -> ev.LeaseEnded:
    gpus = lease.gpus if isinstance(lease, ActiveLease) else ()
    if not state.settings.awaits_reading_after_release:
        gpus = tuple(key for key in gpus if state.slots[key].members.get(lease.id))
    use = state.lease_uses.get(lease.id, LeaseUse(lease.id))
    used = (use.peak_memory_mb, use.mean_utilization_percent)
    return ev.LeaseEnded(now, lease.id, reason, gpus, now + state.wall_offset_s, by, why, *used)


def _live(state: PoolState) -> list[QueuedLease | ActiveLease]:
    """The leases that have not ended, sorted, so that the same ones are remembered however the history was told."""
    leases = (lease for _, lease in sorted(state.leases.items()))
    return [lease for lease in leases if not isinstance(lease, EndedLease)]


def _is_on(lease: ActiveLease, node: str) -> bool:
    return any(key.node == node for key in lease.gpus)


def _off_node(ended: ev.LeaseEnded, node: str) -> ev.LeaseEnded:
    """The end of a lease of which nothing is left on this node."""
    return replace(ended, draining=tuple(key for key in ended.draining if key.node != node))


def _drained(state: PoolState, node: str, now: float) -> list[ev.GpuDrained]:
    draining = [lease for _, lease in sorted(state.leases.items()) if isinstance(lease, EndedLease)]
    return [ev.GpuDrained(now, lease.id, key) for lease in draining for key in lease.draining if key.node == node]


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
