"""GET /timeline: who held which GPU over the last hours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from gpu_worker_pool.core.accounting.timeline import Span, Timeline
from gpu_worker_pool.core.model.lease import ActiveLease, DrainingLease, LiveLease
from gpu_worker_pool.core.model.slot import GpuSlot
from gpu_worker_pool.ledger.sqlite.accounts import Accounts
from gpu_worker_pool.server.authority.snapshot import encode
from gpu_worker_pool.server.http.call import Call, Reply
from gpu_worker_pool.server.http.loop_share import Pauses
from gpu_worker_pool.server.http.problems import Refused

from .history import HistoryCalls
from .lease_view import iso_time

DEFAULT_HOURS = 6.0
FEWEST_HOURS = 0.1
MOST_HOURS = 168.0
# More than any picture shows, and still an answer of a megabyte or two.
MOST_SPANS = 5_000


class ShownGpu(NamedTuple):
    """A GPU as the picture names it; without index and name where it has not been looked at, or is there no more."""

    uuid: str
    gpu_id: int | None
    name: str | None


class TimelineCalls(HistoryCalls):
    """Answers it."""

    name = "timeline"

    async def show(self, call: Call) -> Reply:
        """GET /timeline: the spans of time that leases held GPUs, by GPU."""
        return 200, await self.timeline(_hours(call.query("hours")))

    async def timeline(self, hours: float) -> bytes:
        """The spans of the last hours."""
        span_s = hours * 3600
        self.check_is_well()
        gpus = _gpus(self.authority.driver.state.slots.values())

        def trace(leases: Sequence[LiveLease], accounts: Accounts) -> bytes:
            # One that drains has ended for its holder, and is written as such.
            live = {lease.id: lease for lease in leases if not isinstance(lease, DrainingLease)}
            active = [lease for lease in live.values() if isinstance(lease, ActiveLease)]

            def begin() -> Timeline:
                now = self.now()
                timeline = Timeline(max(now - span_s, 0.0), now, most=MOST_SPANS)
                for lease in sorted(active, key=lambda lease: lease.granted_at, reverse=True):
                    timeline.add(lease)
                return timeline

            timeline, complete_since = accounts.trace(begin, but_for=live)
            return self._encode(timeline, complete_since, gpus)

        return await self.read(trace)

    def _encode(self, timeline: Timeline, complete_since: float | None, gpus: Sequence[ShownGpu]) -> bytes:
        known = {gpu.uuid for gpu in gpus}
        gone = [ShownGpu(uuid, None, None) for uuid in sorted(timeline.by_gpu.keys() - known)]
        pauses = Pauses()
        shown = []
        for gpu in (*gpus, *gone):
            spans = []
            for span in sorted(timeline.by_gpu.get(gpu.uuid, ()), key=_start):
                spans.append(encode(_view(span)))
                pauses.pass_on()
            shown.append(b'%b,"spans":[%b]}' % (encode(gpu._asdict())[:-1], b",".join(spans)))
        head = encode(
            {
                "node": self.node,
                "since": iso_time(timeline.since),
                "until": iso_time(timeline.now),
                "complete_since": iso_time(complete_since),
            }
        )
        rest = encode(
            {
                "is_cut": timeline.is_cut,
                "unknown_leases": timeline.unknown_leases,
                "server_id": self.authority.id,
                "source": self.authority.sampler.snapshot.source,
            }
        )
        return b'%b,"gpus":[%b],%b' % (head[:-1], b",".join(shown), rest[1:])


def _gpus(slots: Iterable[GpuSlot]) -> list[ShownGpu]:
    """What is there, by index; a GPU once, though the node may have had another name before."""
    found: dict[str, ShownGpu] = {}
    for slot in slots:
        if slot.reading is not None or slot.key.uuid not in found:
            gpu = slot.reading.gpu if slot.reading else None
            found[slot.key.uuid] = ShownGpu(slot.key.uuid, gpu.index if gpu else None, gpu.name if gpu else None)
    return sorted(found.values(), key=lambda gpu: (inf if gpu.gpu_id is None else gpu.gpu_id, gpu.uuid))


def _start(span: Span) -> tuple[float, str]:
    return (span.since, span.lease_id)


def _view(span: Span) -> dict[str, Any]:
    return {
        "lease_id": span.lease_id,
        "owner": span.owner,
        "worker_id": span.worker_id,
        "label": span.label,
        "since": iso_time(span.since),
        "until": iso_time(span.until),
        "end_reason": span.end_reason,
        "is_shared": span.is_shared,
    }


def _hours(query: Mapping[str, str]) -> float:
    text = query.get("hours", str(DEFAULT_HOURS))
    try:
        hours = float(text)
    except ValueError:
        hours = -inf
    if not FEWEST_HOURS <= hours <= MOST_HOURS:
        raise Refused(422, f"hours: {text[:40]!r} is no number of hours from {FEWEST_HOURS:g} to {MOST_HOURS:g}.")
    return hours
