"""Leases inside a lease: a request with a parent uses the GPUs that its parent holds already.

Such a *sub-lease* does not stand in the pool's queue and takes no place on a GPU, so it never changes what other leases
get. Thresholds and readings are not asked again: the GPU is the parent's. A sub-lease without `memory_mb` has its GPU to
itself among the sub-leases of its parent. Sub-leases with `memory_mb` share it within what the parent may use. If the
parent is a gang, a sub-lease has its GPUs on one node of it, or on as many as it asks for. Inside one
lease the order is strict: higher priority first, then first come, first served, and no waiter passes another. A sub-lease
ends with its parent at the latest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.gpu_names import shown
from gpu_worker_pool.core.model.lease import ActiveLease, DrainingLease, EndedLease, QueuedLease
from gpu_worker_pool.core.model.request import Request, Wishes, matches_model
from gpu_worker_pool.core.model.state import PoolState

from .placement import Grant
from .verdicts import Eligible, Leased, NoRoom, NotAmong, OtherNode, ReadingUnknown, TooSmall, Verdict, WrongModel

MAX_DEPTH = 16
MAX_SHARERS = 64
ADVICE = "to ask for other GPUs, use --new (Python: new=True; HTTP: leave parent out)"


class InsidePass(NamedTuple):
    """The grants to waiters inside leases, and the leases inside which no waiter can be served now."""

    grants: Sequence[Grant]
    settled: tuple[str, ...]


NOTHING_INSIDE = InsidePass((), ())


def serve_inside(state: PoolState) -> InsidePass:
    """Look at each lease inside which something changed, and serve the first waiter there."""
    if not state.inside.unsettled:
        return NOTHING_INSIDE
    grants: list[Grant] = []
    settled: list[str] = []
    for parent_id in sorted(state.inside.unsettled):
        line = state.inside.waiting_in(parent_id)
        gpus = None
        if line:
            wishes = state.queued(line[0][-1]).request.wishes
            gpus = _place(state, _active(state, parent_id), wishes)
        if gpus is None:
            settled.append(parent_id)
        else:
            grants.append(Grant(line[0][-1], gpus))
    return InsidePass(grants, tuple(settled))


def why_refused_inside(state: PoolState, request: Request) -> str | None:
    """Why this request can never be served inside its parent; None if it can."""
    parent_id = request.parent or ""
    parent = state.find(parent_id)
    if not isinstance(parent, ActiveLease):
        match parent:
            case QueuedLease():
                fate = "still waits for its GPUs"
            case DrainingLease(ended=EndedLease(reason=reason)) | EndedLease(reason=reason):
                fate = f"has ended ({reason})"
            case _:
                fate = "is not known here; it ended long ago, or another server granted it"
        return f"the parent, lease {parent_id}, {fate}. If GPU_POOL_LEASE_ID is left over, unset it; {ADVICE}"
    if parent.request.holder.owner != request.holder.owner:
        return f"the parent, lease {parent_id}, belongs to another owner; {ADVICE}"
    if len(list(ancestors(state, parent))) >= MAX_DEPTH:
        return f"{MAX_DEPTH} leases are inside each other already, which is the limit; {ADVICE}"
    unfit = (OtherNode, NotAmong, WrongModel, TooSmall)
    wishes = request.wishes
    fitting = Counter(
        key.node for key in parent.gpus if not isinstance(judge_inside(state, parent, key, wishes), unfit)
    )
    if sum(number >= wishes.gpus for number in fitting.values()) >= wishes.nodes:
        return None
    return f"lease {parent_id} has {_contents(state, parent)}, not {request.wishes}; {ADVICE}"


def judge_inside(state: PoolState, parent: ActiveLease, key: GpuKey, wishes: Wishes) -> Verdict:
    """Judge one GPU of a lease for a request inside it."""
    slot = state.slots[key]
    if wishes.node is not None and key.node != wishes.node:
        return OtherNode(wishes.node)
    if slot.reading is None:
        return ReadingUnknown("state")  # after a restart; its index is not known yet
    if wishes.among is not None and key not in state.capacity.named(wishes.among):
        return NotAmong(shown(wishes.among))
    if wishes.model is not None and not matches_model(wishes.model, slot.reading.gpu.name):
        return WrongModel(slot.reading.gpu.name, wishes.model)
    limit_mb = _limit_mb(state, parent, key)
    if wishes.memory_mb is not None and limit_mb is not None and wishes.memory_mb > limit_mb:
        return TooSmall(limit_mb, wishes.memory_mb)
    others = _users(state, parent, key)
    asked_mb = [other.request.wishes.memory_mb for other in others]
    if others and (wishes.memory_mb is None or None in asked_mb or len(others) >= MAX_SHARERS):
        holders = tuple(str(other.request.holder) for other in others)
        return Leased(tuple(other.id for other in others), holders, min(other.granted_at for other in others))
    if wishes.memory_mb is None:
        return Eligible(0.0)
    if limit_mb is None:
        return ReadingUnknown("memory size")
    committed_mb = sum(mb or 0.0 for mb in asked_mb)
    if committed_mb + wishes.memory_mb > limit_mb:
        return NoRoom(committed_mb, wishes.memory_mb, limit_mb, tuple(str(other.request.holder) for other in others))
    return Eligible(limit_mb - committed_mb)  # the fullest first, so that whole GPUs stay whole


def leases_inside(state: PoolState, lease_id: str) -> list[QueuedLease | ActiveLease]:
    """The live leases inside a lease, and those inside these; the innermost come first."""
    found: list[QueuedLease | ActiveLease] = []
    outer = [lease_id] if state.inside else []
    while outer:
        parent = outer.pop()
        inner = sorted(state.inside.active_in(parent))
        found += [_active(state, id_) for id_ in inner]
        found += [state.queued(id_) for *_, id_ in state.inside.waiting_in(parent)]
        outer += inner
    return found[::-1]


def parent_of(state: PoolState, lease: QueuedLease) -> ActiveLease:
    return _active(state, lease.request.parent or "")


def _place(state: PoolState, parent: ActiveLease, wishes: Wishes) -> tuple[GpuKey, ...] | None:
    usable: dict[str, list[tuple[float, int, GpuKey]]] = {}
    for place, key in enumerate(parent.gpus):
        verdict = judge_inside(state, parent, key, wishes)
        if isinstance(verdict, Eligible):
            usable.setdefault(key.node, []).append((verdict.score, place, key))
    enough = [sorted(found) for found in usable.values() if len(found) >= wishes.gpus]
    if len(enough) < wishes.nodes:
        return None
    # The fullest GPUs first, then the fullest nodes.
    enough.sort(key=lambda found: (sum(score for score, _, _ in found[: wishes.gpus]), len(found), found[0][1]))
    chosen = [item for found in enough[: wishes.nodes] for item in found[: wishes.gpus]]
    return tuple(key for _, _, key in sorted(chosen, key=lambda item: item[1]))


def _users(state: PoolState, parent: ActiveLease, key: GpuKey) -> list[ActiveLease]:
    inner = [_active(state, id_) for id_ in sorted(state.inside.active_in(parent.id))]
    return [lease for lease in inner if key in lease.gpus]


def _limit_mb(state: PoolState, lease: ActiveLease, key: GpuKey) -> float | None:
    """The memory that a lease may use on a GPU: its share, or that of the lease it is in, or all of it."""
    for outer in ancestors(state, lease):
        if outer.request.wishes.memory_mb is not None:
            return outer.request.wishes.memory_mb
    reading = state.slots[key].reading
    return reading.memory_total_mb if reading else None


def ancestors(state: PoolState, lease: ActiveLease) -> Iterator[ActiveLease]:
    """The lease itself and the leases it is in, outwards."""
    yield lease
    while lease.request.parent is not None:
        lease = _active(state, lease.request.parent)
        yield lease


def _active(state: PoolState, lease_id: str) -> ActiveLease:
    lease = state.leases[lease_id]
    assert isinstance(lease, ActiveLease), lease  # noqa: S101 - a broken invariant must not go on
    return lease


def _contents(state: PoolState, parent: ActiveLease) -> str:
    names = []
    is_gang = len({key.node for key in parent.gpus}) > 1
    for key in parent.gpus:
        reading = state.slots[key].reading
        limit_mb = _limit_mb(state, parent, key)
        memory = "" if limit_mb is None else f" with {limit_mb:.0f} MB"
        node = f" of {key.node}" if is_gang else ""
        index = reading.gpu.index if reading else key.uuid
        names.append(f"GPU {index}{node}" + (f" ({reading.gpu.name}{memory})" if reading else ""))
    left_out = len(names) - 3
    return ", ".join(names[:3]) + (f" and {left_out} more" if left_out > 0 else "")
