"""GET /metrics: the text for Prometheus. Gauges are read at each scrape, and the counters of leases follow the pool's events.

The lines are written here, without a library: it makes several objects for each sample, which takes 100 ms for a thousand GPUs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from time import time
from typing import Any

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import EVERYBODY_ELSE
from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.core.model.lease import FULL_WEIGHT, ActiveLease, Basis, EndedLease, EndReason, QueuedLease
from gpu_worker_pool.core.model.slot import memory_use
from gpu_worker_pool.core.queue.idleness import idle_s
from gpu_worker_pool.core.queue.planner import FreeAt
from gpu_worker_pool.host.pauses import LoopShare
from gpu_worker_pool.server.views.pool_view import STATES, gpu_states

from .authority.pool import Pool
from .box.sampler import Sampler

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"
# From an immediate hand-over to a night in the queue, and from a test run to a week of training.
WAIT_BUCKETS_S = (0.01, 0.1, 1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600)
HOLD_BUCKETS_S = (1, 10, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 24 * 3600, 7 * 24 * 3600)
WRITE_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)
# Callers choose the owners' names; a label for each of very many would grow without bound.
MAX_OWNERS = 200
OTHERS = "(others)"
MB = 1024 * 1024


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _free_mb(reading: Reading) -> float | None:
    if reading.memory_total_mb is None or reading.memory_used_mb is None:
        return None
    return reading.memory_total_mb - reading.memory_used_mb


# The metrics of a reading: name, help and value; a value of None is left out.
Gauge = tuple[str, str, Callable[[Reading], float | None]]
OWN: tuple[Gauge, ...] = (
    ("gpupool_gpu_memory_total_bytes", "Memory of the GPU.", lambda r: _scaled(r.memory_total_mb, MB)),
    ("gpupool_gpu_memory_used_bytes", "Memory in use.", lambda r: _scaled(r.memory_used_mb, MB)),
    ("gpupool_gpu_utilization_ratio", "Utilization, 0 to 1.", lambda r: _scaled(r.utilization_percent, 0.01)),
    ("gpupool_gpu_temperature_celsius", "Temperature.", lambda r: r.temperature_c),
    ("gpupool_gpu_power_watts", "Power drawn.", lambda r: r.power_draw_w),
    ("gpupool_gpu_power_limit_watts", "Power limit.", lambda r: r.power_limit_w),
    ("gpupool_gpu_healthy", "1 if the GPU answers without an error.", lambda r: r.fault is None),
)
DCGM: tuple[Gauge, ...] = (
    ("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %).", lambda r: r.utilization_percent),
    ("DCGM_FI_DEV_FB_USED", "Framebuffer memory used (in MiB).", lambda r: r.memory_used_mb),
    ("DCGM_FI_DEV_FB_FREE", "Framebuffer memory free (in MiB).", _free_mb),
    ("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C).", lambda r: r.temperature_c),
    ("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", lambda r: r.power_draw_w),
)


class Family:
    """The lines of one metric."""

    def __init__(self, name: str, text: str, kind: str = "gauge") -> None:
        self.name = name
        self.lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]

    def add(self, value: float, labels: str = "", suffix: str = "") -> None:
        self.lines.append(f"{self.name}{suffix}{f'{{{labels}}}' if labels else ''} {float(value)}")


def _labels(**labels: str) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _family(name: str, text: str, values: Mapping[Any, float] | float, label: str = "", kind: str = "gauge") -> Family:
    """One value, or one for each value of a label."""
    family = Family(name, text, kind)
    if not isinstance(values, Mapping):
        family.add(values)
    else:
        for key, value in values.items():
            family.add(value, _labels(**{label: key}))
    return family


class Histogram:
    """`buckets` are the upper bounds, in order."""

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        self._name, self._text, self._buckets = name, text, buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._buckets, value)] += 1
        self._sum += value

    def families(self, began_at: float) -> Iterator[Family]:
        family = Family(self._name, self._text, "histogram")
        for bound, number in zip((*map(float, self._buckets), "+Inf"), accumulate(self._counts), strict=True):
            family.add(number, f'le="{bound}"', "_bucket")
        family.add(sum(self._counts), suffix="_count")
        family.add(self._sum, suffix="_sum")
        yield family
        yield _family(f"{self._name}_created", self._text, began_at)


class Metrics:
    def __init__(self, sampler: Sampler, pool: Pool, *, with_dcgm_names: bool) -> None:
        self._sampler = sampler
        self._pool = pool
        self._gauges = OWN + (DCGM if with_dcgm_names else ())
        self._began_at = time()
        self._owners: set[str] = set()
        self._gpu_seconds: defaultdict[str, float] = defaultdict(float)  # of leases that have ended
        self._granted = 0
        self._ended = dict.fromkeys(EndReason, 0)
        self._wait = Histogram("gpupool_lease_wait_seconds", "From the request to the grant.", WAIT_BUCKETS_S)
        self._hold = Histogram("gpupool_lease_hold_seconds", "From the grant to the end.", HOLD_BUCKETS_S)
        self._write = Histogram("gpupool_journal_write_seconds", "Duration of a commit.", WRITE_BUCKETS_S)
        pool.follow(self._follow)
        pool.follow_writes(self._write.add)

    async def text(self, loop_share: LoopShare | None = None) -> bytes:
        """The text, made in turns of the event loop."""
        share = loop_share or LoopShare()
        families: list[Family] = [*await self._readings(share), *await self._slots(share), *self._samples()]
        families += await self._leases(share)
        await share.yield_if_due()
        return "\n".join([line for family in families for line in family.lines] + [""]).encode()

    async def _readings(self, share: LoopShare) -> list[Family]:
        snapshot = self._sampler.snapshot
        families = [(Family(name, text), value) for name, text, value in self._gauges]
        for reading in snapshot.readings:
            gpu = reading.gpu
            labels = _labels(
                gpu=str(gpu.index), name=gpu.name, node=gpu.key.node, source=snapshot.source, uuid=gpu.key.uuid
            )
            for family, value_of in families:
                if (value := value_of(reading)) is not None:
                    family.add(value, labels)
            await share.yield_if_due()
        return [family for family, _ in families]

    async def _slots(self, share: LoopShare) -> Iterable[Family]:
        """The state has a sample for each word, so that a sum counts GPUs, and a state that a GPU has left goes to 0."""
        states = Family("gpupool_gpu_state", "1 for the state the GPU is in, as in /pool; 0 for the others.")
        outside = Family("gpupool_gpu_memory_outside_bytes", "Memory in use that belongs to no lease.")
        for slot, state_now in gpu_states(self._pool):
            # A GPU that has not been read since the start has no index.
            place = _labels(gpu=str(slot.reading.gpu.index) if slot.reading else "", node=slot.key.node)
            uuid = _labels(uuid=slot.key.uuid)
            for state in STATES:
                states.add(state == state_now, f'{place},state="{state}",{uuid}')
            use = memory_use(slot, self._pool.state.ignored_processes)
            if use is not None and slot.reading is not None:
                outside.add(use.outside_mb * MB, f"{place},{uuid}")
            await share.yield_if_due()
        return states, outside

    def _samples(self) -> Iterator[Family]:
        sampler = self._sampler
        yield _family("gpupool_gpus", "GPUs that are shown.", len(sampler.snapshot.readings))
        yield _family("gpupool_reading_age_seconds", "Age of the last reading.", sampler.age_s())
        yield _family("gpupool_look_seconds", "Duration of the last sample.", sampler.last_sample_s)
        yield _family("gpupool_looks_total", "Samples of the GPUs.", sampler.samples, kind="counter")
        yield _family("gpupool_looks_failed_total", "Samples that failed.", sampler.failed_samples, kind="counter")

    async def _leases(self, share: LoopShare) -> list[Family]:
        """The leases as they are at the call, so that GPU-seconds only grow."""
        pool, state, gpu_seconds = self._pool, self._pool.state, self._gpu_seconds.copy()
        now, now_at = pool.now(), pool.wall_now()
        numbers: Counter[str] = Counter()
        waiting = []
        for lease in list(state.leases.values()):
            numbers[lease.__class__.__name__] += 1
            if isinstance(lease, QueuedLease):
                waiting.append(lease.id)
            elif isinstance(lease, ActiveLease):
                # The slots of one that has ended meanwhile may be gone.
                numbers["idle"] += state.leases.get(lease.id) is lease and idle_s(state, lease, now) is not None
                numbers["warned"] += lease.ending is not None
                numbers["preemptible"] += lease.request.preemptible
                held_s = self._counted_s(lease.granted_at, now_at) * len(lease.gpus)
                gpu_seconds[self._label(lease.request.holder.owner)] += held_s
            await share.yield_if_due()
        starts = await pool.expected_starts(share)
        return [*self._counted(), *self._now(numbers, waiting, starts), *self._of_owners(gpu_seconds)]

    def _counted(self) -> Iterator[Family]:
        granted, ended = "Leases granted.", "Leases ended, by reason."
        since = dict.fromkeys(self._ended, self._began_at)
        yield _family("gpupool_leases_granted_total", granted, self._granted, kind="counter")
        yield _family("gpupool_leases_granted_created", granted, self._began_at)
        yield _family("gpupool_leases_ended_total", ended, self._ended, "reason", "counter")
        yield _family("gpupool_leases_ended_created", ended, since, "reason")
        for histogram in (self._wait, self._hold, self._write):
            yield from histogram.families(self._began_at)

    def _now(
        self, numbers: Mapping[str, int], waiting: Sequence[str], starts: Mapping[str, FreeAt]
    ) -> Iterator[Family]:
        pool = self._pool
        bases = Counter(starts[lease_id].basis if lease_id in starts else Basis.UNKNOWN for lease_id in waiting)
        can_grant = pool.why_no_grants is None
        stale_after_s = pool.state.settings.stale_after_s
        for name, text, value in (
            ("leases_active", "Leases that hold GPUs.", numbers["ActiveLease"]),
            ("leases_queued", "Requests that wait.", numbers["QueuedLease"]),
            ("leases_draining", "Ended leases whose GPUs are not free yet.", numbers["EndedLease"]),
            ("leases_idle", "Leases whose GPUs compute nothing.", numbers["idle"]),
            ("leases_warned", "Leases that the server is about to end.", numbers["warned"]),
            ("leases_preemptible", "Active leases that may be preempted.", numbers["preemptible"]),
            ("waiting_connections", "Connections that wait for a lease.", pool.waiting),
            ("can_grant", "1 if the journal can be written, by this server or by the leader of its fleet.", can_grant),
            ("reading_stale_after_seconds", "Age from which a reading is too old for a grant.", stale_after_s),
        ):
            yield _family(f"gpupool_{name}", text, value)
        text = "Requests that wait, by what their expected start rests on."
        yield _family("gpupool_leases_expected", text, {basis: bases[basis] for basis in Basis}, "basis")

    def _of_owners(self, gpu_seconds: Mapping[str, float]) -> Iterator[Family]:
        """What owners hold, and the quotas of those that held GPUs before: there may be very many quotas."""
        state = self._pool.state
        held: defaultdict[str, float] = defaultdict(float)
        for owner, use in state.usage.items():
            if use.held:
                held[self._label(owner)] += use.held / FULL_WEIGHT
        named = (EVERYBODY_ELSE, *sorted(self._owners))
        quotas = {
            owner: most for owner in named if owner in state.quotas and (most := state.quotas[owner].gpus) is not None
        }
        yield _family(
            "gpupool_owner_gpus", "GPUs held now, by owner; a share of a GPU counts as a part.", held, "owner"
        )
        yield _family("gpupool_quota_gpus", "Most GPUs allowed.", quotas, "owner")
        yield _family("gpupool_gpu_seconds_total", "GPU-seconds held, by owner.", gpu_seconds, "owner", "counter")

    def _counted_s(self, granted_at: float, until_at: float) -> float:
        """The seconds held since this server started: a sum over a restart must not count the earlier ones twice."""
        return max(until_at - max(granted_at, self._began_at), 0.0)

    def _follow(self, events: Sequence[ev.Event]) -> None:
        for event in events:
            if isinstance(event, ev.LeaseGranted):
                self._granted += 1
                if (lease := self._pool.state.find(event.lease_id)) is not None:
                    self._wait.add(max(event.granted_at - lease.requested_at, 0.0))
            elif isinstance(event, ev.LeaseEnded):
                self._ended[event.reason] += 1
                lease = self._pool.state.find(event.lease_id)
                if isinstance(lease, EndedLease) and lease.granted_at is not None:
                    self._hold.add(max(lease.ended_at - lease.granted_at, 0.0))
                    counted_s = self._counted_s(lease.granted_at, lease.ended_at)
                    self._gpu_seconds[self._label(lease.request.holder.owner)] += counted_s * len(lease.gpus)

    def _label(self, owner: str | None) -> str:
        name = owner or ""
        if name not in self._owners and len(self._owners) >= MAX_OWNERS:
            return OTHERS
        self._owners.add(name)
        return name
