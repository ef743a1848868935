"""Metrics for Prometheus: gauges are read at each scrape, the counters of leases follow the pool's events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import time

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import EVERYBODY_ELSE
from gpu_worker_pool.core.model.lease import (
    FULL_WEIGHT,
    ActiveLease,
    Basis,
    EndedLease,
    EndReason,
    QueuedLease,
)
from gpu_worker_pool.core.queue.idleness import idle_s
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.authority.sampler import Sampler
from gpu_worker_pool.server.http.loop_share import LoopShare

from .histogram import PlainHistogram

# From an immediate hand-over to a night in the queue, and from a test run to a week of training.
WAIT_BUCKETS_S = (0.01, 0.1, 1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600)
HOLD_BUCKETS_S = (1, 10, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 24 * 3600, 7 * 24 * 3600)
WRITE_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)
# Callers choose the owners' names; a label for each of very many would grow without bound.
MAX_OWNERS = 200
OTHERS = "(others)"


class SamplerCollector(Collector):
    """Reads the sampler when Prometheus scrapes; it has no counters of its own. The GPUs are in gpu_metrics.py."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        yield GaugeMetricFamily("gpupool_gpus", "GPUs that are shown.", len(self._sampler.snapshot.readings))
        yield GaugeMetricFamily("gpupool_reading_age_seconds", "Age of the last reading.", self._sampler.age_s())
        yield GaugeMetricFamily("gpupool_look_seconds", "Duration of the last sample.", self._sampler.last_sample_s)
        yield CounterMetricFamily("gpupool_looks", "Samples of the GPUs.", self._sampler.samples)
        yield CounterMetricFamily("gpupool_looks_failed", "Samples that failed.", self._sampler.failed_samples)


@dataclass
class _LeasesNow:
    """What the live leases come to."""

    gpu_seconds: dict[str, float] = field(default_factory=dict)
    kinds: Counter[type] = field(default_factory=Counter)
    waiting: list[str] = field(default_factory=list)
    idle: int = 0
    warned: int = 0
    preemptible: int = 0


class LeaseMetrics(Collector):
    """`look` goes before each scrape."""

    def __init__(self, pool: Pool, registry: CollectorRegistry) -> None:
        self._pool = pool
        self._began_at = time()
        self._owners: set[str] = set()
        self._gpu_seconds: dict[str, float] = {}
        self._now = _LeasesNow()
        self._granted = 0
        self._ended = dict.fromkeys(EndReason, 0)
        self._wait = PlainHistogram("gpupool_lease_wait_seconds", "From the request to the grant.", WAIT_BUCKETS_S)
        self._hold = PlainHistogram("gpupool_lease_hold_seconds", "From the grant to the end.", HOLD_BUCKETS_S)
        self._write = PlainHistogram("gpupool_journal_write_seconds", "Duration of a commit.", WRITE_BUCKETS_S)
        pool.follow(self._follow)
        pool.follow_writes(self._write.add)
        registry.register(self)

    async def look(self, loop_share: LoopShare) -> None:
        """Go through the leases, in turns of the event loop. The next scrape shows them as they were at the call, so that
        GPU-seconds only grow.
        """
        state, looked = self._pool.state, _LeasesNow(dict(self._gpu_seconds))
        now, now_at = self._pool.now(), self._pool.wall_now()
        for lease in list(state.leases.values()):
            looked.kinds[type(lease)] += 1
            if isinstance(lease, QueuedLease):
                looked.waiting.append(lease.id)
            elif isinstance(lease, ActiveLease):
                # The slots of one that has ended meanwhile may be gone.
                looked.idle += state.leases.get(lease.id) is lease and idle_s(state, lease, now) is not None
                looked.warned += lease.ending is not None
                looked.preemptible += lease.request.preemptible
                owner = self._label(lease.request.holder.owner)
                held_s = self._counted_s(lease.granted_at, now_at) * len(lease.gpus)
                looked.gpu_seconds[owner] = looked.gpu_seconds.get(owner, 0.0) + held_s
            await loop_share.yield_if_due()
        self._now = looked

    def collect(self) -> Iterator[Metric]:
        """What was counted, what `look` found, and the pool's other numbers."""
        began_at = self._began_at
        yield CounterMetricFamily("gpupool_leases_granted", "Leases granted.", self._granted, created=began_at)
        ended = CounterMetricFamily("gpupool_leases_ended", "Leases ended, by reason.", labels=["reason"])
        for reason, number in self._ended.items():
            ended.add_metric([reason], number, created=began_at)
        yield ended
        yield from (self._wait.family(), self._hold.family(), self._write.family())
        found, state = self._now, self._pool.state
        can_grant = float(self._pool.why_no_grants is None)
        stale_after_s = state.settings.stale_after_s
        for name, text, value in (
            ("leases_active", "Leases that hold GPUs.", found.kinds[ActiveLease]),
            ("leases_queued", "Requests that wait.", found.kinds[QueuedLease]),
            ("leases_draining", "Ended leases whose GPUs are not free yet.", found.kinds[EndedLease]),
            ("leases_idle", "Leases whose GPUs compute nothing.", found.idle),
            ("leases_warned", "Leases that the server is about to end.", found.warned),
            ("leases_preemptible", "Active leases that may be preempted.", found.preemptible),
            ("waiting_connections", "Connections that wait for a lease.", self._pool.waiting),
            ("can_grant", "1 if the journal can be written, by this server or by the leader of its fleet.", can_grant),
            ("reading_stale_after_seconds", "Age from which a reading is too old for a grant.", stale_after_s),
        ):
            yield GaugeMetricFamily(f"gpupool_{name}", text, value)
        yield self._expected(found.waiting)
        yield from self._owner_gpus()
        seconds = CounterMetricFamily("gpupool_gpu_seconds", "GPU-seconds held, by owner.", labels=["owner"])
        for owner, total_s in found.gpu_seconds.items():
            seconds.add_metric([owner], total_s)
        yield seconds

    def _expected(self, waiting: Sequence[str]) -> GaugeMetricFamily:
        starts = self._pool.expected_starts()
        bases = Counter(starts[lease_id].basis if lease_id in starts else Basis.UNKNOWN for lease_id in waiting)
        family = GaugeMetricFamily(
            "gpupool_leases_expected",
            "Requests that wait, by what their expected start rests on.",
            labels=["basis"],
        )
        for basis in Basis:
            family.add_metric([basis], bases[basis])
        return family

    def _owner_gpus(self) -> Iterator[GaugeMetricFamily]:
        """What owners hold, and the quotas of those that held GPUs before: there may be very many quotas."""
        state = self._pool.state
        held: dict[str, float] = {}
        for owner, use in state.usage.items():
            if use.held:
                label = self._label(owner)
                held[label] = held.get(label, 0.0) + use.held / FULL_WEIGHT
        with_quota = [owner for owner in (EVERYBODY_ELSE, *sorted(self._owners)) if owner in state.quotas]
        for name, text, values in (
            ("owner_gpus", "GPUs held now, by owner; a share of a GPU counts as a part.", held),
            ("quota_gpus", "Most GPUs allowed.", {owner: state.quotas[owner].gpus for owner in with_quota}),
        ):
            family = GaugeMetricFamily(f"gpupool_{name}", text, labels=["owner"])
            for label, value in values.items():
                if value is not None:
                    family.add_metric([label], value)
            yield family

    def _counted_s(self, granted_at: float, until_at: float) -> float:
        """The seconds held since this server started: a sum over a restart must not count the earlier ones twice."""
        return max(until_at - max(granted_at, self._began_at), 0.0)

    def _follow(self, events: Sequence[ev.Event]) -> None:
        for event in events:
            if isinstance(event, ev.LeaseGranted):
                self._granted += 1
                if (lease := self._found(event.lease_id)) is not None:
                    self._wait.add(max(event.granted_at - lease.requested_at, 0.0))
            elif isinstance(event, ev.LeaseEnded):
                self._ended[event.reason] += 1
                self._note_end(self._found(event.lease_id))

    def _note_end(self, lease: QueuedLease | ActiveLease | EndedLease | None) -> None:
        if isinstance(lease, EndedLease) and lease.granted_at is not None:
            self._hold.add(max(lease.ended_at - lease.granted_at, 0.0))
            owner = self._label(lease.request.holder.owner)
            counted_s = self._counted_s(lease.granted_at, lease.ended_at)
            self._gpu_seconds[owner] = self._gpu_seconds.get(owner, 0.0) + counted_s * len(lease.gpus)

    def _found(self, lease_id: str) -> QueuedLease | ActiveLease | EndedLease | None:
        return self._pool.state.find(lease_id)

    def _label(self, owner: str | None) -> str:
        name = owner or ""
        if name not in self._owners and len(self._owners) >= MAX_OWNERS:
            return OTHERS
        self._owners.add(name)
        return name
