"""Why a request is still waiting, as data and in one sentence."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice

from gpu_worker_pool.core.model.bounds import show_mb
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey
from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.slot import GpuSlot
from gpu_worker_pool.core.model.state import PoolState

from .eligibility import judge
from .owners import Order, over_quota
from .verdicts import Verdict, verdict
from .withheld import Withheld

MAX_NAMES = 3
# The verdicts that are made for one list of waiters: a hundred different wishes on a thousand GPUs.
MOST_VERDICTS = 100_000
# The GPUs that are judged for one waiter: each answer to a waiter has these verdicts, and a fleet may have ten thousand GPUs.
MOST_GPUS = 100


@dataclass(frozen=True, slots=True)
class GpuVerdict:
    """The verdict on one GPU for a waiter; `gpu` is None if only its leases are known."""

    key: GpuKey
    gpu: Gpu | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Explanation:
    lease_id: str
    position: int
    queue_length: int
    verdicts: tuple[GpuVerdict, ...]
    wants: str
    # Why its owner may have no more now, and why a waiter that came later is ahead.
    limit: Verdict | None = None
    ahead: str | None = None
    # Of a gang: how many of its nodes have enough.
    gang: str | None = None
    # The GPUs that have no verdict, because there are too many.
    unjudged: int = 0

    @property
    def head(self) -> str:
        return f"Position {self.position} of {self.queue_length}, waiting for {self.wants}"

    @property
    def obstacles(self) -> str:
        reasons = [] if self.limit is None else [str(self.limit)]
        if self.verdicts and not reasons:
            reasons = _summary(self.verdicts)
            reasons += [f"and {self.unjudged} more GPUs"] if self.unjudged else []
        reasons += [each for each in (self.gang, self.ahead) if each is not None]
        return "; ".join(reasons) if reasons else "no GPU has been seen yet"

    def __str__(self) -> str:
        return f"{self.head}: {self.obstacles}"


def explain(state: PoolState, lease_id: str, now: float) -> Explanation | None:
    """Explain a waiting request; None if the lease is not queued."""
    lease = state.leases.get(lease_id)
    return Explainer(state, now).explain(lease) if isinstance(lease, QueuedLease) else None


class Explainer:
    """Explains many waiting requests; equal wishes share their verdicts.

    A verdict is as of the first request that needed it. Queue positions are as of now.
    """

    def __init__(self, state: PoolState, now: float, most_verdicts: int = MOST_VERDICTS) -> None:
        self._state = state
        self._left = most_verdicts
        self._now = max(now, state.clock)
        self._verdicts: dict[Wishes, tuple[GpuVerdict, ...]] = {}
        self._order = Order(state, self._now)
        self._withheld = Withheld(state, self._now)
        self._is_anything_kept = bool(
            state.reservation or state.claims or state.bookings or state.quotas or state.groups
        )

    def can_afford(self, lease: QueuedLease) -> bool:
        """Whether to explain this request too. With many GPUs, a verdict on each for every waiter takes seconds."""
        return self._left > 0 or (lease.request.wishes in self._verdicts and not self._is_anything_kept)

    def explain(self, lease: QueuedLease) -> Explanation:
        state, wishes = self._state, lease.request.wishes
        verdicts, known = self._verdicts.get(wishes), state.slots_on(wishes.node)
        # A gang is explained by its nodes, and that takes all of them.
        judged = len(known) if wishes.nodes > 1 else min(len(known), MOST_GPUS)
        if verdicts is None or self._is_anything_kept:
            self._left -= judged
        if verdicts is None:
            slots = sorted(islice(known, judged), key=lambda slot: (slot.key.node, _index(slot), slot.key.uuid))
            verdicts = self._verdicts[wishes] = tuple(
                GpuVerdict(slot.key, slot.gpu, judge(state, slot, wishes, self._now)) for slot in slots
            )
        limit = self._limit_of(lease)
        if limit is not None:
            verdicts = tuple(replace(item, verdict=limit) if item.verdict.is_eligible else item for item in verdicts)
        elif self._is_anything_kept:
            verdicts = tuple(self._as_kept(item, lease) for item in verdicts)
        return Explanation(
            lease.id,
            self._order.position(lease),
            len(state.queue),
            verdicts,
            str(wishes),
            limit=limit,
            ahead=self._order.why_later(lease),
            gang=_why_no_gang(verdicts, wishes) if wishes.nodes > 1 else None,
            unjudged=len(known) - judged,
        )

    def _limit_of(self, lease: QueuedLease) -> Verdict | None:
        if lease.id in self._state.passed_over:
            return verdict("not_taken_up")
        return over_quota(self._state, self._state.queue.class_of[lease.id])

    def position(self, lease: QueuedLease) -> int:
        return self._order.position(lease)

    def _as_kept(self, item: GpuVerdict, lease: QueuedLease) -> GpuVerdict:
        """The verdict on a GPU that would do, but is kept from this waiter."""
        kept_for = self._withheld.why_kept(item.key, lease) if item.verdict.is_eligible else None
        return item if kept_for is None else GpuVerdict(item.key, item.gpu, kept_for)


def free_elsewhere(state: PoolState, wishes: Wishes, now: float) -> dict[str, int]:
    """How many GPUs of other boxes of the fleet would do now, for a request that asks for those of one box: of each that has
    enough.
    """
    if wishes.node is None:
        return {}
    anywhere = replace(wishes, node=None)
    others = islice((slot for slot in state.slots.values() if slot.key.node != wishes.node), MOST_GPUS)
    free = Counter(slot.key.node for slot in others if judge(state, slot, anywhere, now).is_eligible)
    return {node: number for node, number in sorted(free.items()) if number >= wishes.gpus}


def _why_no_gang(verdicts: tuple[GpuVerdict, ...], wishes: Wishes) -> str:
    available = Counter(item.key.node for item in verdicts if item.verdict.is_eligible)
    nodes = sum(number >= wishes.gpus for number in available.values())
    gpus = f"{wishes.gpus} GPU{'' if wishes.gpus == 1 else 's'}"
    have = "node has" if nodes == 1 else "nodes have"
    return f"it needs {wishes.nodes} nodes with {gpus} each at the same time; {nodes or 'no'} {have} that many"


def _summary(verdicts: tuple[GpuVerdict, ...]) -> list[str]:
    """One phrase for each kind of verdict, with its number of GPUs; last the GPUs for which waiting is of no use."""
    by_code: dict[str, list[Verdict]] = {}
    for item in verdicts:
        by_code.setdefault(item.verdict.code, []).append(item.verdict)
    kinds = sorted(by_code.values(), key=lambda alike: alike[0].is_lasting)
    return [f"{len(alike)} {_phrase(alike)}" for alike in kinds]


def _phrase(alike: list[Verdict]) -> str:
    if alike[0].code == "leased":
        holders = dict.fromkeys(name for verdict in alike for name in verdict.facts["holders"])
        return f"leased by {_some(list(holders))}"
    if alike[0].code == "no_room":
        sharers = dict.fromkeys(name for verdict in alike for name in verdict.facts["holders"])
        shared = f", shared by {_some(list(sharers))}" if sharers else ""
        return f"with less than {show_mb(alike[0].facts['asked_mb'])} left{shared}"
    if alike[0].code == "not_among":
        return "not asked for"  # which ones are is said before
    phrases = _some(list(dict.fromkeys(str(verdict) for verdict in alike)))
    # Its box, its memory: behind a number of GPUs it is theirs.
    return re.sub("^its ", "whose ", phrases) if alike[0].code.startswith("reading_") else phrases


def _some(names: list[str]) -> str:
    left_out = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {left_out} more" if left_out > 0 else "")


def _index(slot: GpuSlot) -> float:
    return slot.gpu.index if slot.gpu else float("inf")
