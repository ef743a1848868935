"""The history of a pool that is put back from an old copy. What happened after the copy is not known."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.state import PoolState

from .condense import condense

# More grants than a node makes between a copy and its return: a fence must not be used twice.
FENCES_AHEAD: Final = 1_000_000_000


def put_back(state: PoolState, reason: str) -> list[ev.DurableEvent]:
    """The short history of `state`, with every GPU out of service for this reason and all fences far ahead.

    A holder on another machine may have a GPU under a lease that the copy does not know, so an operator decides when the
    GPUs are granted again. That includes GPUs that the copy does not know: they are out of service when a server first
    reads them. A GPU that was out of service keeps its reason.
    """
    fences = tuple((node, state.fences.get(node, 0) + FENCES_AHEAD) for node in sorted({*state.nodes, *state.fences}))
    history = [
        replace(event, fences=fences) if isinstance(event, ev.HistoryCondensed) else event for event in condense(state)
    ]
    known = {GpuKey(node, gpu.uuid) for node, facts in state.nodes.items() for gpu in facts.gpus or ()}
    held = {key for lease in state.leases.values() for key in getattr(lease, "gpus", ())}
    out = sorted((known | held) - state.excluded.keys())
    excluded = [ev.GpuExcluded(state.clock, key, reason) for key in out]
    return [*history, *excluded, ev.NewGpusExcluded(state.clock, reason)]
