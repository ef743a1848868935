"""GET /usage and /timeline: who used the GPUs and for how long, and who held which GPU when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from functools import partial
from heapq import nsmallest
from math import inf
from typing import Any

from gpu_worker_pool.core.accounting.timeline import Timeline
from gpu_worker_pool.core.accounting.usage import US_PER_S, LeaseTimes, UsageAccount, UsageTotals
from gpu_worker_pool.core.accounting.weeks import WeeklyUsage
from gpu_worker_pool.core.model.gpu import Gpu
from gpu_worker_pool.core.model.lease import ActiveLease, DrainingLease, LiveLease
from gpu_worker_pool.core.model.slot import GpuSlot
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.host.pauses import Pauses
from gpu_worker_pool.ledger.accounts import Accounts
from gpu_worker_pool.ledger.journal import JournalError
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.http.call import Call, Handlers
from gpu_worker_pool.server.http.problems import RETRY_AFTER, Refused
from gpu_worker_pool.server.http.response import Response, encode, encode_with
from gpu_worker_pool.server.http.scope import Scope
from gpu_worker_pool.wire import accounting as wire
from gpu_worker_pool.wire.routes import HOURS, SINCE, UNTIL

from .times import read_time

# A long history takes seconds to read. One call reads at a time, and so many may wait.
MOST_ASKING = 16
DEFAULT_SPAN_S = 24 * 3600.0
US_PER_HOUR = 3600 * US_PER_S
# Callers choose the owners' names, so there may be very many. Those with the least use are shown as one.
MOST_OWNERS = 2_000
# So many owners are shown by week.
MOST_OWNERS_BY_WEEK = 50
# More than any chart shows, and still an answer of one or two megabytes.
MOST_SPANS = 5_000


class PastLeases:
    """Reads past leases in a thread, with a connection of its own, so that no other call waits."""

    def __init__(self, pool: Pool, open_accounts: Callable[[], Accounts]) -> None:
        self._pool = pool
        self._open_accounts = open_accounts
        self._turn = asyncio.Lock()
        self._asking = 0

    async def read(self, work: Callable[[Sequence[LiveLease], Accounts], bytes]) -> bytes:
        """Run `work` in a thread, on the live leases and the accounts; Refused if they cannot be read.

        Each lease is found once: leases that are live now are passed as live, those that have ended are written before
        the read, and those that end in between are recognized by their id.
        """
        if self._asking >= MOST_ASKING:
            raise Refused(
                503, f"{MOST_ASKING} such calls wait already, which is the limit; ask again in a moment.", RETRY_AFTER
            )
        self._asking += 1
        try:
            async with self._turn:
                self.check_journal()
                leases = list(self._pool.state.leases.values())
                await self._pool.caught_up()
                self.check_journal()
                return await asyncio.to_thread(lambda: work(leases, self._open_accounts()))
        except JournalError as error:
            raise _not_readable(str(error)) from error
        finally:
            self._asking -= 1

    def check_journal(self) -> None:
        if (trouble := self._pool.past_trouble) is not None:
            raise _not_readable(trouble)


def _not_readable(why: str) -> Refused:
    return Refused(503, f"The past leases cannot be read now: {why.rstrip('.')}. Fix that, or ask later.", RETRY_AFTER)


class UsageCalls(PastLeases):
    def handlers(self) -> Handlers:
        return {"usage": self.show}

    async def show(self, call: Call) -> Response:
        query = call.query(SINCE, UNTIL)
        self.check_journal()  # not even the time is known before the journal is open
        since, until = read_time("since", query.get("since")), read_time("until", query.get("until"))
        return Response(200, await self.usage(since, until, call.view_scope))

    async def usage_today(self, scope: Scope) -> bytes:
        """The usage since midnight in this machine's time zone."""
        self.check_journal()
        now = self._pool.wall_now()
        midnight = datetime.fromtimestamp(now).replace(hour=0, minute=0, second=0, microsecond=0)  # noqa: DTZ006 - its own
        return await self.usage(min(midnight.timestamp(), now - 1.0), None, scope)

    async def weeks(self, number: int, scope: Scope) -> bytes:
        """GPU-hours by owner of so many weeks, from Monday to Sunday in this machine's time zone."""
        self.check_journal()

        def count(leases: Sequence[LiveLease], accounts: Accounts) -> bytes:
            live = _live(leases, scope)

            def begin() -> WeeklyUsage:
                now = self._pool.wall_now()
                return WeeklyUsage(_mondays(now, number), now)

            weekly, complete_since = accounts.count(begin, but_for=live, node=scope.node)
            for lease in live.values():
                weekly.count(lease)
            return self._encode_weeks(weekly, _mondays(weekly.now, number), complete_since, scope)

        return await self.read(count)

    def _encode_weeks(
        self, weekly: WeeklyUsage, starts: Sequence[float], complete_since: float | None, scope: Scope
    ) -> bytes:
        shown = nsmallest(MOST_OWNERS_BY_WEEK, weekly.by_owner.items(), key=lambda item: (-sum(item[1]), item[0] or ""))
        return encode(
            wire.WeeksView(
                node=scope.name(self._pool.node),
                weeks=tuple(
                    wire.WeekTotal(since=iso_time(start), gpu_hours=_hours(total))
                    for start, total in zip(starts, weekly.totals(), strict=True)
                ),
                until=iso_time(weekly.now),
                owners=tuple(
                    wire.OwnerWeeks(owner=owner, gpu_hours=tuple(map(_hours, weeks))) for owner, weeks in shown
                ),
                other_owners=len(weekly.by_owner) - len(shown),
                complete_since=iso_time(complete_since),
                unknown_leases=weekly.unknown_leases,
                server_id=self._pool.id,
            )
        )

    async def usage(self, since: float | None, until: float | None, scope: Scope) -> bytes:
        """The usage from `since` to before `until`; by default the last day, until now. Of one box of a fleet, requests
        that left the queue without a GPU are not counted: they were nowhere.
        """
        now = self._pool.wall_now()
        end = now if until is None else min(until, now)
        since = max(end - DEFAULT_SPAN_S, 0.0) if since is None else since
        if since >= end:
            raise Refused(422, f"since: {iso_time(since)} is not before {iso_time(end)}, the end of the span.")

        def count(leases: Sequence[LiveLease], accounts: Accounts) -> bytes:
            live = _live(leases, scope)
            account, complete_since = accounts.count(
                lambda: UsageAccount(since, until, self._pool.wall_now()), but_for=live, node=scope.node
            )
            for lease in live.values():
                if scope.node is None or lease.gpu_count:
                    account.count(lease)
            return self._encode(account, complete_since, scope)

        return await self.read(count)

    def _encode(self, account: UsageAccount, complete_since: float | None, scope: Scope) -> bytes:
        shown = nsmallest(MOST_OWNERS, account.by_owner.items(), key=_most_use_first)
        names = {owner for owner, _ in shown}
        others = UsageTotals()
        for owner, usage in account.by_owner.items():
            if owner not in names:
                others.add(usage)
        left_out = len(account.by_owner) - len(shown)
        return encode(
            wire.UsageView(
                node=scope.name(self._pool.node),
                since=iso_time(account.since),
                until=iso_time(min(account.now, inf if account.until is None else account.until)),
                complete_since=iso_time(complete_since),
                is_complete=complete_since is None or complete_since <= account.since,
                owners=tuple(wire.OwnerUsage(owner=owner, **_totals(usage)) for owner, usage in shown),
                others=wire.OtherUsage(owners=left_out, **_totals(others)) if left_out else None,
                total=wire.UsageTotal(**_totals(account.total())),
                server_id=self._pool.id,
                source=self._pool.snapshot.source,
            )
        )


def _mondays(now: float, number: int) -> list[float]:
    """The beginnings of this week and of those before it, first one first. A week may be an hour longer or shorter."""
    today = datetime.fromtimestamp(now).replace(hour=0, minute=0, second=0, microsecond=0)  # noqa: DTZ006 - its own
    monday = today - timedelta(days=today.weekday())
    # A clock that stands at the beginning of 1970 has no weeks before it.
    starts = [(monday - timedelta(weeks=week)).timestamp() for week in reversed(range(number))]
    return [*starts[:-1], min(starts[-1], now)]


def _live(leases: Iterable[LiveLease], scope: Scope) -> dict[str, LeaseTimes]:
    """The live leases by id, with their GPUs within the scope; a draining lease has ended for the accounting."""
    found = {}
    for lease in leases:
        if not isinstance(lease, DrainingLease):
            granted_at, gpus = None, 0
            if isinstance(lease, ActiveLease):
                granted_at, gpus = lease.granted_at, sum(scope.node in {None, key.node} for key in lease.gpus)
            owner, is_shared = lease.request.holder.owner, lease.request.wishes.is_shared
            found[lease.id] = LeaseTimes(owner, gpus, is_shared, lease.requested_at, granted_at, None, is_live=True)
    return found


def _most_use_first(item: tuple[str | None, UsageTotals]) -> tuple[int, int, int, str]:
    """The sort key: most use first; equal use by name, so that the order is stable."""
    owner, usage = item
    return (-usage.gpu_us - usage.shared_gpu_us, -usage.leases, -usage.wait_us, owner or "")


def _totals(usage: UsageTotals) -> dict[str, Any]:
    return {
        "gpu_hours": _hours(usage.gpu_us),
        "shared_gpu_hours": _hours(usage.shared_gpu_us),
        "leases": usage.leases,
        "running": usage.running,
        "longest_hours": _hours(usage.longest_us),
        "wait_hours": _hours(usage.wait_us),
        "unknown_leases": usage.unknown_leases,
        "unknown_waits": usage.unknown_waits,
        "time_limit_ends": usage.time_limit_ends,
        "preempted_ends": usage.preempted_ends,
        "idle_ends": usage.idle_ends,
    }


def _hours(time_us: int) -> float:
    return round(time_us / US_PER_HOUR, 6)


class TimelineCalls(PastLeases):
    def handlers(self) -> Handlers:
        return {"timeline": self.show}

    async def show(self, call: Call) -> Response:
        return Response(200, await self.timeline(call.query(HOURS)["hours"], call.view_scope))

    async def timeline(self, hours: float, scope: Scope) -> bytes:
        span_s = hours * 3600
        self.check_journal()
        gpus = _gpus(self._pool.state.slots_on(scope.node), with_nodes=scope.is_fleet)

        def trace(leases: Sequence[LiveLease], accounts: Accounts) -> bytes:
            # A draining lease has ended for its holder, and is written as ended.
            live = {lease.id: lease for lease in leases if not isinstance(lease, DrainingLease)}
            active = [lease for lease in live.values() if isinstance(lease, ActiveLease)]

            def begin() -> Timeline:
                now = self._pool.wall_now()
                timeline = Timeline(max(now - span_s, 0.0), now, most=MOST_SPANS, node=scope.node)
                for lease in sorted(active, key=lambda lease: lease.granted_at, reverse=True):
                    timeline.add(lease)
                return timeline

            timeline, complete_since = accounts.trace(begin, but_for=live)
            return self._encode(timeline, complete_since, gpus, scope)

        return await self.read(trace)

    def _encode(
        self, timeline: Timeline, complete_since: float | None, gpus: Sequence[wire.TimelineGpu], scope: Scope
    ) -> bytes:
        known = {gpu.uuid for gpu in gpus}
        gone = [_gpu(uuid, None) for uuid in sorted(timeline.by_gpu.keys() - known)]
        pauses = Pauses()
        shown = []
        for gpu in (*gpus, *gone):
            spans = []
            for span in sorted(timeline.by_gpu.get(gpu.uuid, ()), key=lambda span: (span.since, span.lease_id)):
                times = {"since": iso_time(span.since), "until": iso_time(span.until)}
                spans.append(encode(wire.TimelineSpan(**{**span._asdict(), **times})))
                pauses.yield_if_due()
            shown.append(encode_with(gpu, spans=spans))
        return encode_with(
            wire.TimelineView(
                node=scope.name(self._pool.node),
                since=iso_time(timeline.since),
                until=iso_time(timeline.now),
                complete_since=iso_time(complete_since),
                gpus=(),
                is_cut=timeline.is_cut,
                unknown_leases=timeline.unknown_leases,
                server_id=self._pool.id,
                source=self._pool.snapshot.source,
            ),
            gpus=shown,
        )


def _gpus(slots: Iterable[GpuSlot], *, with_nodes: bool) -> list[wire.TimelineGpu]:
    """The GPUs by index, each once, even if the node had another name before; of a fleet by node first."""
    found: dict[str, wire.TimelineGpu] = {}
    for slot in slots:
        if slot.reading is not None or slot.key.uuid not in found:
            found[slot.key.uuid] = _gpu(slot.key.uuid, slot.gpu, slot.key.node if with_nodes else None)
    return sorted(found.values(), key=_place)


def _place(gpu: wire.TimelineGpu) -> tuple[str, float, str]:
    node = gpu.node if isinstance(gpu, wire.FleetTimelineGpu) else ""
    return (node, inf if gpu.gpu_id is None else gpu.gpu_id, gpu.uuid)


def _gpu(uuid: str, gpu: Gpu | None, node: str | None = None) -> wire.TimelineGpu:
    kind = wire.TimelineGpu if node is None else partial(wire.FleetTimelineGpu, node=node)
    return kind(uuid=uuid, gpu_id=gpu.index if gpu else None, name=gpu.name if gpu else None, spans=())
