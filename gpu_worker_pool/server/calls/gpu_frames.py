"""GPUs in lists: one that has not changed is not encoded again."""

from __future__ import annotations

from typing import NamedTuple

from gpu_worker_pool.core.model.gpu import GpuKey, Reading
from gpu_worker_pool.core.model.slot import GpuSlot
from gpu_worker_pool.core.queue.verdicts import Verdict
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.http.response import encode

from .gpu_view import gpu_view, known_gpu, newcomers_verdict, why_unknown


class _ShownFacts(NamedTuple):
    """All that an encoded GPU depends on, apart from its slot and its reading."""

    verdict: Verdict
    leases: tuple[str, ...]
    members: tuple[object, ...]
    is_excluded: bool
    ignored: frozenset[str]


class _KeptGpu(NamedTuple):
    slot: GpuSlot
    reading: Reading | None
    facts: _ShownFacts
    body: bytes


class GpuFrames:
    """Keeps each GPU that was shown, as it was encoded last. One that is gone leaves nothing behind."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._kept: dict[GpuKey, _KeptGpu] = {}
        self._made = 0

    def __repr__(self) -> str:
        return f"<GpuFrames: {len(self._kept)} kept, {self._made} made>"

    def encode(self, slot: GpuSlot) -> bytes:
        """Encode one GPU. Its verdict is made again each time: readings grow old, and bookings begin."""
        pool, state = self._pool, self._pool.state
        if why_unknown(pool, slot) is not None:
            return encode(gpu_view(pool, slot))
        verdict = newcomers_verdict(state, slot, pool.now())
        ignored = frozenset(state.ignored_processes)
        facts = _ShownFacts(
            verdict, tuple(slot.occupants), tuple(slot.members.items()), slot.key in state.excluded, ignored
        )
        kept = self._kept.get(slot.key)
        if kept is None or kept.slot is not slot or kept.reading is not slot.reading or kept.facts != facts:
            self._forget_gone()
            kept = _KeptGpu(slot, slot.reading, facts, encode(known_gpu(state, slot, verdict)))
            self._kept[slot.key] = kept
            self._made += 1
        return kept.body

    def _forget_gone(self) -> None:
        slots = self._pool.state.slots
        if len(self._kept) > len(slots):
            self._kept = {key: kept for key, kept in self._kept.items() if slots.get(key) is kept.slot}
