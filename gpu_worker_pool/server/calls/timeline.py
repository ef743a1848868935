"""GET /timeline: who held which GPU over the last hours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from gpu_worker_pool.core.accounting.timeline import Timeline
from gpu_worker_pool.core.model.gpu import Gpu
from gpu_worker_pool.core.model.lease import ActiveLease, DrainingLease, LiveLease
from gpu_worker_pool.core.model.slot import GpuSlot
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.ledger.sqlite.accounts import Accounts
from gpu_worker_pool.server.encoding import encode, encode_with
from gpu_worker_pool.server.http.call import Call, Handlers
from gpu_worker_pool.server.http.loop_share import Pauses
from gpu_worker_pool.server.http.response import Response
from gpu_worker_pool.wire.accounting import TimelineGpu, TimelineSpan, TimelineView
from gpu_worker_pool.wire.routes import HOURS

from .past_leases import PastLeases

# More than any chart shows, and still an answer of one or two megabytes.
MOST_SPANS = 5_000


class TimelineCalls(PastLeases):
    def handlers(self) -> Handlers:
        return {"timeline": self.show}

    async def show(self, call: Call) -> Response:
        return Response(200, await self.timeline(call.query(HOURS)["hours"]))

    async def timeline(self, hours: float) -> bytes:
        span_s = hours * 3600
        self.check_journal()
        gpus = _gpus(self._pool.state.slots.values())

        def trace(leases: Sequence[LiveLease], accounts: Accounts) -> bytes:
            # A draining lease has ended for its holder, and is written as ended.
            live = {lease.id: lease for lease in leases if not isinstance(lease, DrainingLease)}
            active = [lease for lease in live.values() if isinstance(lease, ActiveLease)]

            def begin() -> Timeline:
                now = self._pool.wall_now()
                timeline = Timeline(max(now - span_s, 0.0), now, most=MOST_SPANS)
                for lease in sorted(active, key=lambda lease: lease.granted_at, reverse=True):
                    timeline.add(lease)
                return timeline

            timeline, complete_since = accounts.trace(begin, but_for=live)
            return self._encode(timeline, complete_since, gpus)

        return await self.read(trace)

    def _encode(self, timeline: Timeline, complete_since: float | None, gpus: Sequence[TimelineGpu]) -> bytes:
        known = {gpu.uuid for gpu in gpus}
        gone = [_gpu(uuid, None) for uuid in sorted(timeline.by_gpu.keys() - known)]
        pauses = Pauses()
        shown = []
        for gpu in (*gpus, *gone):
            spans = []
            for span in sorted(timeline.by_gpu.get(gpu.uuid, ()), key=lambda span: (span.since, span.lease_id)):
                times = {"since": iso_time(span.since), "until": iso_time(span.until)}
                spans.append(encode(TimelineSpan(**{**span._asdict(), **times})))
                pauses.yield_if_due()
            shown.append(encode_with(gpu, spans=spans))
        return encode_with(
            TimelineView(
                node=self._pool.node,
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


def _gpus(slots: Iterable[GpuSlot]) -> list[TimelineGpu]:
    """The GPUs by index, each once, even if the node had another name before."""
    found: dict[str, TimelineGpu] = {}
    for slot in slots:
        if slot.reading is not None or slot.key.uuid not in found:
            found[slot.key.uuid] = _gpu(slot.key.uuid, slot.reading.gpu if slot.reading else None)
    return sorted(found.values(), key=lambda gpu: (inf if gpu.gpu_id is None else gpu.gpu_id, gpu.uuid))


def _gpu(uuid: str, gpu: Gpu | None) -> TimelineGpu:
    return TimelineGpu(uuid=uuid, gpu_id=gpu.index if gpu else None, name=gpu.name if gpu else None, spans=())
