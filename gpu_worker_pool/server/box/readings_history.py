"""The last readings of each GPU: in full, and as lines of a chart."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import datetime

from gpu_worker_pool.core.model.gpu import Gpu
from gpu_worker_pool.host.pauses import Pauses
from gpu_worker_pool.server.encoding import encode
from gpu_worker_pool.wire.page import Lines, PastView
from gpu_worker_pool.wire.statistics import GpuHistory, GpuPast, HistoryPoint

from .snapshot import Snapshot

MOST_POINTS = 300

MeasuredPercent = float | None


def encode_readings(snapshots: Sequence[Snapshot], latest: Snapshot, max_history: int) -> bytes:
    """Encode `/gpu/history`: the snapshots, grouped by GPU. It takes a while with many snapshots: call it in a thread."""
    pauses = Pauses()
    first: dict[str, Gpu] = {}
    points: dict[str, list[HistoryPoint]] = {}
    for snapshot in snapshots:
        for reading, shown in zip(snapshot.readings, snapshot.stats.gpus, strict=True):
            uuid = first.setdefault(reading.gpu.key.uuid, reading.gpu).key.uuid
            points.setdefault(uuid, []).append(
                HistoryPoint(
                    timestamp=snapshot.timestamp,
                    memory_usage_percent=shown.memory.usage_percent,
                    utilization_percent=shown.utilization_percent,
                    temperature_c=shown.temperature_c,
                    power_draw_w=shown.power.draw_w,
                )
            )
        pauses.yield_if_due()
    gpus = []
    for gpu in sorted(first.values(), key=lambda gpu: gpu.index):
        uuid = gpu.key.uuid
        gpus.append(GpuPast(gpu_id=gpu.index, uuid=uuid, name=gpu.name, readings=tuple(points[uuid])))
        pauses.yield_if_due()
    return encode(
        GpuHistory(max_history=max_history, gpus=tuple(gpus), timestamp=latest.timestamp, source=latest.source)
    )


class _Point:
    """A group of consecutive snapshots: the time of the last, and the highest values."""

    def __init__(self) -> None:
        self.size = 0
        self.taken: datetime | None = None
        self.percents: dict[str, tuple[MeasuredPercent, MeasuredPercent]] = {}

    def add(self, snapshot: Snapshot) -> None:
        self.size += 1
        self.taken = snapshot.taken
        for reading in snapshot.readings:
            uuid = reading.gpu.key.uuid
            memory, load = self.percents.get(uuid, (None, None))
            self.percents[uuid] = _higher(memory, reading.memory_percent), _higher(load, reading.utilization_percent)


class ReadingLines:
    """The readings as lines: a number for each GPU and time, `null` if it was not read.

    More than `MOST_POINTS` snapshots are combined in groups of equal size. The groups are kept between calls, so that
    each snapshot is processed once.
    """

    def __init__(self, max_history: int) -> None:
        self._max_history = max_history
        self._group = -(-max_history // MOST_POINTS)
        self._points: deque[_Point] = deque(maxlen=-(-max_history // self._group))
        self._last: Snapshot | None = None

    def encode(self, snapshots: Sequence[Snapshot]) -> bytes:
        """Encode these snapshots, oldest first. Call it in a thread, one call at a time."""
        pauses = Pauses()
        for snapshot in self._new_among(snapshots):
            if not self._points or self._points[-1].size >= self._group:
                self._points.append(_Point())
            self._points[-1].add(snapshot)
            self._last = snapshot
            pauses.yield_if_due()
        points = list(self._points)
        gpus: dict[str, Lines] = {}
        for uuid in dict.fromkeys(uuid for point in points for uuid in point.percents):
            both = [point.percents.get(uuid, (None, None)) for point in points]
            gpus[uuid] = Lines(
                memory_percent=tuple(memory for memory, _ in both),
                utilization_percent=tuple(load for _, load in both),
            )
            pauses.yield_if_due()
        times = tuple(round(point.taken.timestamp(), 3) for point in points if point.taken)
        return encode(PastView(max_history=self._max_history, measured_at=times, gpus=gpus))

    def _new_among(self, snapshots: Sequence[Snapshot]) -> Sequence[Snapshot]:
        for number in range(len(snapshots), 0, -1):
            if snapshots[number - 1] is self._last:
                return snapshots[number:]
        return snapshots


def _higher(known: MeasuredPercent, value: MeasuredPercent) -> MeasuredPercent:
    if value is None:
        return known
    value = round(value, 2)
    return value if known is None else max(known, value)
