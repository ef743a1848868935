"""How much of its GPUs each running job uses: the most memory, the highest and the mean utilization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpu_worker_pool.jobs.life import RunLease, UsageMeasured
from gpu_worker_pool.wire.pool import PoolGpu, PoolView


@dataclass(slots=True)
class UsageMeter:
    """What was seen of one run. Unknown is None: a GPU that could not be read counts as nothing, not as 0."""

    peak_memory_mb: float | None = None
    peak_utilization_percent: float | None = None
    _sum: float = 0.0
    _samples: int = 0

    @classmethod
    def going_on(cls, before: UsageMeasured | None) -> UsageMeter:
        """Go on where an earlier keeper was; the mean begins again, with what was seen until then as one sample."""
        if before is None:
            return cls()
        mean = before.mean_utilization_percent
        return cls(before.peak_memory_mb, before.peak_utilization_percent, mean or 0.0, 0 if mean is None else 1)

    def see(self, lease: RunLease, gpus: Mapping[str, PoolGpu]) -> bool:
        """Take in one look at the pool; returns whether it was the most so far."""
        own = [gpu for uuid in lease.uuids if (gpu := gpus.get(uuid)) is not None]
        before = (self.peak_memory_mb, self.peak_utilization_percent)
        self.peak_memory_mb = _most(self.peak_memory_mb, _memory_mb(lease, own))
        # Of a shared GPU it is not known whose computation it is.
        used = [gpu.utilization_percent for gpu in own if gpu.utilization_percent is not None and not lease.is_shared]
        if used:
            mean = sum(used) / len(used)
            self.peak_utilization_percent = _most(self.peak_utilization_percent, mean)
            self._sum, self._samples = self._sum + mean, self._samples + 1
        return before != (self.peak_memory_mb, self.peak_utilization_percent)

    def measured(self, at: float) -> UsageMeasured:
        mean = round(self._sum / self._samples, 1) if self._samples else None
        peak = self.peak_utilization_percent
        return UsageMeasured(
            at=at,
            peak_memory_mb=self.peak_memory_mb,
            peak_utilization_percent=None if peak is None else round(peak, 1),
            mean_utilization_percent=mean,
        )


def gpus_in(pool: PoolView) -> dict[str, PoolGpu]:
    return {gpu.uuid: gpu for gpu in pool.gpus}


def _memory_mb(lease: RunLease, gpus: list[PoolGpu]) -> float | None:
    """The memory of the job's processes; where those are not known, that of GPUs that are the job's alone."""
    own = [
        process.used_mb
        for gpu in gpus
        for process in gpu.processes or ()
        if lease.id in process.lease_ids and process.used_mb is not None
    ]
    if own:
        return sum(own)
    used = [gpu.memory_used_mb for gpu in gpus if gpu.memory_used_mb is not None]
    return sum(used) if used and not lease.is_shared else None


def _most(known: float | None, seen: float | None) -> float | None:
    return seen if known is None else known if seen is None else max(known, seen)
