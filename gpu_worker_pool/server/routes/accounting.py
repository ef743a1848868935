"""GET /usage and /timeline: who used the GPUs and for how long, and who held which GPU when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from heapq import nsmallest
from math import inf
from typing import Any

from gpu_worker_pool.core.model.configured import Group
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease, QueuedLease
from gpu_worker_pool.core.model.slot import GpuSlot
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.host.pauses import Pauses
from gpu_worker_pool.ledger.accounts import Accounts, LiveUse, Moment, Span, Usage, UsageTotals
from gpu_worker_pool.ledger.journal import JournalError
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.encoding import encode, shared_fields
from gpu_worker_pool.server.http.call import Call
from gpu_worker_pool.server.http.pool_route import PoolRouter
from gpu_worker_pool.server.http.response import RETRY_AFTER, Refusal
from gpu_worker_pool.server.http.shared_answer import SharedAnswers
from gpu_worker_pool.server.parameters import Hours, Since, Until
from gpu_worker_pool.server.views.lease_view import ending_of
from gpu_worker_pool.server.views.pool_view import slot_order
from gpu_worker_pool.server.views.target import Target
from gpu_worker_pool.wire import accounting as wire
from gpu_worker_pool.wire.bounds import DEFAULT_HOURS

# A long history takes seconds to read. One call reads at a time, and this many may wait.
MOST_ASKING = 16
DEFAULT_SPAN_S = 24 * 3600.0
# Callers choose the owners' names, so there may be very many. Those with the least use are shown as one.
MOST_OWNERS = 2_000
# More than any chart shows, and still an answer of one or two megabytes.
MOST_SPANS = 5_000

WaitingOrActive = QueuedLease | ActiveLease

router = PoolRouter(tags=("leases",), answered_by="leader", problems=(422, 503))


@router.get("/usage", help="Get GPU-hours by owner; ?since=...&until=...", response_model=wire.UsageView)
async def usage(call: Call, since: Since = None, until: Until = None) -> bytes:
    """GPU-hours by owner."""
    return await call.part(PastLeases).usage(since, until, call.target)


@router.get(
    "/timeline",
    help="Get who held which GPU over the last hours; ?hours=6",
    response_model=wire.TimelineView,
)
async def timeline(call: Call, hours: Hours = DEFAULT_HOURS) -> bytes:
    """Who held which GPU."""
    trace = partial(call.part(PastLeases).timeline, hours, call.target)
    return await call.part(SharedAnswers).get(("timeline", hours, call.target), trace)


class PastLeases:
    """Encoded answers from live and past leases. These are read in a thread, with a connection of its own, so that no other
    call waits. Each method raises a Refusal if they cannot be read.
    """

    def __init__(self, pool: Pool, open_accounts: Callable[[], Accounts]) -> None:
        self._pool = pool
        self._open_accounts = open_accounts
        self._turn = asyncio.Lock()
        self._asking = 0

    async def usage(self, since: float | None, until: float | None, target: Target) -> bytes:
        """The usage from `since` to before `until`; by default the last day, until now. Of one box of a fleet, requests
        that left the queue without a GPU are not counted: they were nowhere.
        """
        now = self._now()
        end = now if until is None else min(until, now)
        begin = max(end - DEFAULT_SPAN_S, 0.0) if since is None else since
        if begin >= end:
            raise Refusal(422, f"since: {iso_time(begin)} is not before {iso_time(end)}, the end of the span.")

        def count(leases: Sequence[WaitingOrActive], accounts: Accounts) -> wire.UsageView:
            span, live = (begin, until), _live(leases, target)
            (by_owner,), moment = accounts.usage([span], self._pool.wall_now, live, target.node)
            return usage_view(self._pool, target, by_owner, span, moment)

        return await self._read(count)

    async def timeline(self, hours: float, target: Target) -> bytes:
        """The holders of each GPU over the last hours."""
        span_s = hours * 3600
        slots = list(self._pool.state.slots_on(target.node))

        def trace(leases: Sequence[WaitingOrActive], accounts: Accounts) -> wire.TimelineView:
            live = _live(leases, target)
            ended, unknown, moment = accounts.held(span_s, self._pool.wall_now, live, target.node, most=MOST_SPANS + 1)
            active = [lease for lease in leases if isinstance(lease, ActiveLease)]
            # A clock that was never set says 1970. A time before 1970 or after now comes from a clock that was set.
            known = [lease for lease in active if 0 <= lease.granted_at <= moment.now]
            latest = sorted(known, key=lambda lease: lease.granted_at, reverse=True)
            by_gpu, is_cut = spans_by_gpu((*latest, *ended), target.node)
            return wire.TimelineView(
                node=target.name(self._pool.node),
                since=iso_time(max(moment.now - span_s, 0.0)),
                until=iso_time(moment.now),
                complete_since=iso_time(moment.complete_since),
                gpus=_gpus(slots, by_gpu, target),
                is_cut=is_cut,
                unknown_leases=unknown + len(active) - len(known),
                server_id=self._pool.id,
                source=self._pool.snapshot.source,
            )

        return await self._read(trace)

    async def _read(self, work: Callable[[Sequence[WaitingOrActive], Accounts], object]) -> bytes:
        """Run `work` in a thread, on the live leases and the accounts, and encode what it returns.

        Each lease is found once: leases that are live now are passed as live, those that have ended are written before
        the read, and those that end in between are recognized by their id and the time of their request.
        """
        if self._asking >= MOST_ASKING:
            raise Refusal(
                503, f"{MOST_ASKING} such calls wait already, which is the limit; ask again in a moment.", RETRY_AFTER
            )
        self._asking += 1
        try:
            async with self._turn:
                self._check_journal()
                # A lease that drains has ended for its holder, and is written as ended.
                leases = [lease for lease in self._pool.state.leases.values() if isinstance(lease, WaitingOrActive)]
                await self._pool.caught_up()
                self._check_journal()
                return await asyncio.to_thread(lambda: encode(work(leases, self._open_accounts())))
        except JournalError as error:
            raise _not_readable(str(error)) from error
        finally:
            self._asking -= 1

    def _now(self) -> float:
        """The time, which is not known before the journal is open."""
        self._check_journal()
        return self._pool.wall_now()

    def _check_journal(self) -> None:
        if (trouble := self._pool.past_trouble) is not None:
            raise _not_readable(trouble)


def _not_readable(why: str) -> Refusal:
    return Refusal(503, f"The past leases cannot be read now: {why.rstrip('.')}. Fix that, or ask later.", RETRY_AFTER)


def usage_view(pool: Pool, target: Target, by_owner: Usage, span: Span, moment: Moment) -> wire.UsageView:
    since, until = span
    shown = nsmallest(MOST_OWNERS, by_owner.items(), key=_most_use_first)
    names = {owner for owner, _ in shown}
    total, others = UsageTotals(), UsageTotals()
    for owner, used in by_owner.items():
        total.add(used)
        if owner not in names:
            others.add(used)
    left_out = len(by_owner) - len(shown)
    return wire.UsageView(
        node=target.name(pool.node),
        since=iso_time(since),
        until=iso_time(min(moment.now, inf if until is None else until)),
        complete_since=iso_time(moment.complete_since),
        is_complete=moment.complete_since is None or moment.complete_since <= since,
        owners=tuple(wire.OwnerUsage(owner=owner, **_totals(used)) for owner, used in shown),
        others=wire.OtherUsage(owners=left_out, **_totals(others)) if left_out else None,
        total=wire.UsageTotal(**_totals(total)),
        server_id=pool.id,
        source=pool.snapshot.source,
        groups=tuple(
            wire.OwnerUsage(owner=name, **_totals(_sum(by_owner, group))) for name, group in pool.state.groups.items()
        ),
    )


def _sum(by_owner: Usage, group: Group) -> UsageTotals:
    total = UsageTotals()
    for member in group.members:
        total.add(by_owner.get(member, UsageTotals()))
    return total


def _live(leases: Iterable[WaitingOrActive], target: Target) -> list[LiveUse]:
    """The live leases with their GPUs within the target."""
    found = []
    for lease in leases:
        granted_at, gpus = None, 0
        if isinstance(lease, ActiveLease):
            granted_at, gpus = lease.granted_at, sum(target.node in {None, key.node} for key in lease.gpus)
        owner, is_shared = lease.request.holder.owner, lease.request.wishes.is_shared
        found.append(LiveUse(lease.id, owner, gpus, is_shared, lease.requested_at, granted_at))
    return found


def _most_use_first(item: tuple[str | None, UsageTotals]) -> tuple[float, int, float, str]:
    """The sort key: most use first; equal use by name, so that the order is stable."""
    owner, usage = item
    return (-usage.gpu_s - usage.shared_gpu_s, -usage.leases, -usage.wait_s, owner or "")


def _totals(usage: UsageTotals) -> dict[str, Any]:
    """Times in hours, and numbers as they are."""
    times = {name.removesuffix("_s"): found for name, found in asdict(usage).items() if name.endswith("_s")}
    hours = {f"{name}_hours": round(found / 3600, 6) for name, found in times.items()}
    return {**hours, **shared_fields(wire.UsageTotal, usage)}


def spans_by_gpu(
    leases: Iterable[ActiveLease | EndedLease], node: str | None = None, most: int = MOST_SPANS
) -> tuple[dict[str, list[ActiveLease | EndedLease]], bool]:
    """The leases on each GPU, by its UUID, and whether some had no room. The first leases are kept, so the latest must come
    first. With a `node`, only its GPUs count.
    """
    by_gpu: dict[str, list[ActiveLease | EndedLease]] = {}
    for lease in leases:
        gpus = [key.uuid for key in lease.gpus if node in {None, key.node}]
        most -= len(gpus)
        if most < 0:
            return by_gpu, True  # a lease shown on only some of its GPUs would mislead
        for uuid in gpus:
            by_gpu.setdefault(uuid, []).append(lease)
    return by_gpu, False


def _gpus(
    slots: Iterable[GpuSlot], by_gpu: Mapping[str, Sequence[ActiveLease | EndedLease]], target: Target
) -> tuple[wire.TimelineGpu, ...]:
    """The GPUs with their spans, each once, even if the node had another name before. Those that were removed come last."""
    known: dict[str, GpuSlot] = {}
    for slot in slots:
        if slot.reading is not None or slot.key.uuid not in known:
            known[slot.key.uuid] = slot
    present = [slot.key.uuid for slot in sorted(known.values(), key=slot_order)]
    pauses, shown = Pauses(), []
    for uuid in (*present, *sorted(by_gpu.keys() - known.keys())):
        spans = []
        for lease in sorted(by_gpu.get(uuid, ()), key=lambda lease: (lease.granted_at or 0.0, lease.id)):
            spans.append(_span(lease))
            pauses.yield_if_due()
        found = known.get(uuid)
        gpu = found.gpu if found else None
        view = partial(wire.FleetTimelineGpu, node=found.key.node) if found and target.is_fleet else wire.TimelineGpu
        gpu_id, name = (gpu.index, gpu.name) if gpu else (None, None)
        shown.append(view(uuid=uuid, gpu_id=gpu_id, name=name, spans=tuple(spans)))
    return tuple(shown)


def _span(lease: ActiveLease | EndedLease) -> wire.TimelineSpan:
    ended = lease if isinstance(lease, EndedLease) else None
    return wire.TimelineSpan(
        lease_id=lease.id,
        owner=lease.request.holder.owner,
        worker_id=lease.request.holder.worker_id,
        label=dict(lease.request.labels).get("command"),
        since=iso_time(lease.granted_at),
        until=None if ended is None else iso_time(ended.ended_at),
        is_shared=lease.request.wishes.is_shared,
        **({"end_reason": None} if ended is None else ending_of(ended)),
    )
