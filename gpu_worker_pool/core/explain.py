"""Why is this request still waiting? In data, and in one sentence."""

from __future__ import annotations

from dataclasses import dataclass

from .eligibility import Eligible, Held, Leased, Verdict, judge
from .gpu import Gpu, GpuKey
from .lease import QueuedLease
from .slot import GpuSlot
from .state import PoolState

MAX_NAMES = 3


@dataclass(frozen=True, slots=True)
class GpuVerdict:
    """What stands between one GPU and the waiter; `gpu` is None where it has not been looked at yet."""

    key: GpuKey
    gpu: Gpu | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where somebody stands in the line, and what is the matter with each GPU of the pool."""

    lease_id: str
    position: int
    queue_length: int
    verdicts: tuple[GpuVerdict, ...]
    wants: str

    def __str__(self) -> str:
        head = f"Position {self.position} of {self.queue_length}, waiting for {self.wants}"
        if not self.verdicts:
            return f"{head}: no GPU has been seen yet"
        return f"{head}: {'; '.join(_summary(self.verdicts))}"


def explain(state: PoolState, lease_id: str, now: float) -> Explanation | None:
    """Explain a waiting request; None where the lease does not wait."""
    lease = state.leases.get(lease_id)
    if not isinstance(lease, QueuedLease):
        return None
    now = max(now, state.clock)
    slots = sorted(state.slots.values(), key=lambda slot: (slot.key.node, _index(slot), slot.key.uuid))
    return Explanation(
        lease_id,
        state.queue.position(lease),
        len(state.queue),
        tuple(
            GpuVerdict(slot.key, slot.reading.gpu if slot.reading else None, _verdict(state, slot, lease, now))
            for slot in slots
        ),
        str(lease.request.wishes),
    )


def _verdict(state: PoolState, slot: GpuSlot, lease: QueuedLease, now: float) -> Verdict:
    verdict = judge(state, slot, lease.request.wishes, now)
    held_for = state.holds.get(slot.key)
    if isinstance(verdict, Eligible) and held_for not in (None, lease.id):
        other = state.queued(held_for)
        if other.order < lease.order:
            return Held(other.id, str(other.request.holder))
    return verdict


def _summary(verdicts: tuple[GpuVerdict, ...]) -> list[str]:
    """One phrase for each kind of verdict, with how many GPUs it concerns."""
    by_code: dict[str, list[Verdict]] = {}
    for item in verdicts:
        by_code.setdefault(item.verdict.code, []).append(item.verdict)
    return [f"{len(alike)} {_phrase(alike)}" for alike in by_code.values()]


def _phrase(alike: list[Verdict]) -> str:
    if isinstance(alike[0], Leased):
        holders = dict.fromkeys(name for verdict in alike if isinstance(verdict, Leased) for name in verdict.holders)
        return f"leased by {_some(list(holders))}"
    return _some(list(dict.fromkeys(str(verdict) for verdict in alike)))


def _some(names: list[str]) -> str:
    left_out = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {left_out} more" if left_out > 0 else "")


def _index(slot: GpuSlot) -> float:
    return slot.reading.gpu.index if slot.reading else float("inf")
