"""Why a request can never be granted, and what there is instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from gpu_worker_pool.core.model.bounds import Thresholds, show_mb
from gpu_worker_pool.core.model.gpu import GpuKey, InventoryGpu, Node
from gpu_worker_pool.core.model.request import Wishes, matches_model, shown
from gpu_worker_pool.core.model.state import PoolState


def why_unservable(state: PoolState, wishes: Wishes) -> str | None:
    """Why no GPU of the pool could ever serve these wishes; None if one could, or if not all GPUs are known."""
    thresholds = state.settings.thresholds_for(wishes)
    if state.facts.could_ever_serve(wishes, thresholds):
        return None  # this is what is usual, and it is told without going through all nodes
    nodes = _nodes_for(state, wishes)
    if not nodes or any(node.gpus is None for node in nodes.values()):
        return None
    if not any(node.gpus for node in nodes.values()):
        return "this pool has no GPU" if wishes.node is None else f"{wishes.node} has no GPU"
    if other := _other_server_of(state, wishes):
        return f"no GPU of this server can serve {wishes}: {other}"
    if min(thresholds) <= 0:
        return "no GPU is below a threshold of 0 %; ask with a higher one"
    were = was_or_were(wishes)
    return f"{wishes} {were} asked for; {_what_there_is(state, wishes, thresholds)}"


def _nodes_for(state: PoolState, wishes: Wishes) -> Mapping[str, Node]:
    if wishes.node is None:
        return state.nodes
    return {name: node for name in (wishes.node,) if (node := state.nodes.get(name)) is not None}


def was_or_were(wishes: Wishes) -> str:
    return "was" if wishes.gpus == 1 else "were"


def _other_server_of(state: PoolState, wishes: Wishes) -> str | None:
    """The server that has a GPU which would do; None if none has."""
    readings = [slot.reading for slot in state.slots_on(wishes.node) if slot.reading]
    servers = (found.other_server for found in readings if matches_model(wishes.model, found.gpu.name))
    return next(filter(None, servers), None)


def _what_there_is(state: PoolState, wishes: Wishes, thresholds: Thresholds) -> str:
    """The first of the wishes that no GPU meets, against what the GPUs have."""
    nodes = _nodes_for(state, wishes)
    found = [(GpuKey(name, gpu.uuid), gpu) for name, node in nodes.items() for gpu in node.gpus or ()]
    here = "this box" if len(nodes) == 1 else "this pool"
    chosen = state.facts.named(wishes)
    if chosen is not None:
        named = [(key, gpu) for key, gpu in found if key in chosen]
        if not named:
            indices = tuple(str(index) for index in sorted({gpu.index for _, gpu in found}))
            return f"{here} has the GPUs {shown(indices)}"
        found = named
    alike = [(key, gpu) for key, gpu in found if matches_model(wishes.model, gpu.name)]
    if not alike:
        return f"{here} has {_models(gpu for _, gpu in found)}"
    enough = [(key, gpu) for key, gpu in alike if state.facts.of(key).could_serve(wishes, thresholds)]
    such = "such " if wishes.named or wishes.model else ""
    if not enough:
        largest_mb = max(gpu.memory_total_mb or 0.0 for _, gpu in alike)
        if not wishes.is_large_enough(largest_mb):
            return f"the largest {such}GPU here has {show_mb(largest_mb)}"
        granted_mb = thresholds.memory_percent * largest_mb / 100
        return (
            f"the largest {such}GPU here has {show_mb(largest_mb)}, of which {show_mb(granted_mb)} can be granted "
            f"(memory threshold {thresholds.memory_percent:g} %)"
        )
    on_nodes = Counter(key.node for key, _ in enough).values()
    most, large = max(on_nodes), sum(number >= wishes.gpus for number in on_nodes)
    such = "such " if such or wishes.memory_mb is not None or wishes.min_memory_mb is not None else ""
    if large and wishes.nodes > 1:
        return f"only {large} node{' has' if large == 1 else 's have'} as many{f' {such}GPUs' if such else ''}"
    has = "this box has" if here == "this box" else "no node has more than"
    return f"{has} {most} {such}GPU{'' if most == 1 else 's'}"


def _models(found: Iterable[InventoryGpu]) -> str:
    """`2 Tesla T4, 1 NVIDIA A100`."""
    return shown(tuple(f"{number} {name}" for name, number in Counter(gpu.name for gpu in found).items()))
