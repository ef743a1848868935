"""What an agent tells the leader of its readings, on one connection.

The time of a reading is the last pool time that was heard before the look began. It cannot be too late, however long
messages take and whatever the clocks of the two machines say.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from operator import attrgetter

from gpu_worker_pool.core.model.gpu import Reading

from .messages import Report

# A look that takes longer than this tells nothing that the leader could use.
HEARD_FOR_S = 60.0
# Smaller changes of the temperature and of the power are not told.
TEMPERATURE_STEP_C = 3.0
POWER_STEP_W = 10.0
# Smaller changes of the memory and of the utilization are told once a second: looks that a lease's end calls for come more often.
MEMORY_STEP_MB = 64.0
UTILIZATION_STEP_PERCENT = 5.0
SMALL_CHANGES_EVERY_S = 1.0
# A leader that has said nothing for this long is gone, or cannot be heard.
LEADER_SILENT_S = 3.0
# An agent says so often that it is there, if no look has ended: mostly one ends every second, and that is enough.
SIGN_OF_LIFE_S = 1.5
_MEASURED = ("at", "temperature_c", "power_draw_w", "memory_used_mb", "utilization_percent")
_facts = attrgetter(*(field.name for field in fields(Reading) if field.name not in _MEASURED))


class Reporting:
    def __init__(self) -> None:
        # When the leader was heard, on the boot clock, and the pool time that it told.
        self._heard: list[tuple[float, float]] = []
        # The last reading of each GPU that was told.
        self._told: dict[str, Reading] = {}
        # GPUs whose lease ended, and the pool time of the order: the leader waits for a later reading.
        self._awaited: dict[str, float] = {}
        # The last report that was made.
        self.last: Report | None = None

    def hear(self, now: float, time: float) -> None:
        """The leader told this pool time."""
        self._heard.append((now, time))
        if self._heard[0][0] < now - 2 * HEARD_FOR_S:
            del self._heard[: bisect_right(self._heard, (now - HEARD_FOR_S, inf))]

    def heard_before(self, boot_s: float) -> float | None:
        index = bisect_right(self._heard, (boot_s, inf))
        return self._heard[index - 1][1] if index else None

    def await_reading(self, gpus: Iterable[str], time: float) -> None:
        """The leader waits for a reading of these GPUs that began after this pool time."""
        self._awaited.update(dict.fromkeys(gpus, time))

    def report(self, readings: Sequence[Reading], began_s: float) -> Report | None:
        """What to tell of one look that began at `began_s`; None if the leader cannot use it."""
        heard = self.heard_before(began_s)
        if heard is None or (self.last is not None and heard < self.last.heard):
            return None
        changed = [reading for reading in readings if self._is_news(reading, heard)]
        for reading in changed:
            uuid = reading.gpu.key.uuid
            self._told[uuid] = reading
            if self._awaited.get(uuid, inf) <= heard:
                del self._awaited[uuid]
        gone = tuple(self._told.keys() - {reading.gpu.key.uuid for reading in readings})
        for uuid in gone:
            del self._told[uuid]
        self.last = Report(heard)
        return Report(heard, tuple(replace(reading, at=heard) for reading in changed), gone)

    def _is_news(self, reading: Reading, heard: float) -> bool:
        uuid = reading.gpu.key.uuid
        told = self._told.get(uuid)
        return told is None or self._awaited.get(uuid, inf) <= heard or not _is_same(told, reading)


@dataclass(slots=True)
class LeaderSession:
    """One connection to a leader. `epoch` is None until the leader has answered the announcement, and `heard_at` until the
    time is known at which that is waited for.
    """

    heard_at: float | None = None
    epoch: int | None = None
    sent_at: float = -inf
    reporting: Reporting = field(default_factory=Reporting)

    def next_due_at(self) -> float:
        silent_at = -inf if self.heard_at is None else self.heard_at + LEADER_SILENT_S
        return silent_at if self.reporting.last is None else min(silent_at, self.sent_at + SIGN_OF_LIFE_S)

    def why_silent(self, now: float) -> str | None:
        """Why this leader is to be left; None if it is heard."""
        is_silent = self.heard_at is not None and now >= self.heard_at + LEADER_SILENT_S
        return f"the leader has said nothing for {LEADER_SILENT_S:g} s" if is_silent else None

    def sign_of_life(self, now: float) -> Report | None:
        """What to send so that the leader hears of this box; None if that is not due."""
        if self.reporting.last is None or now < self.sent_at + SIGN_OF_LIFE_S:
            return None
        self.sent_at = now
        return self.reporting.last


def _is_same(told: Reading, reading: Reading) -> bool:
    """Whether a reading says nothing that must be told now. Temperature and power change all the time and decide nothing."""
    if told is reading:
        return True
    if (
        _facts(reading) != _facts(told)
        or not _is_near(told.temperature_c, reading.temperature_c, TEMPERATURE_STEP_C)
        or not _is_near(told.power_draw_w, reading.power_draw_w, POWER_STEP_W)
    ):
        return False
    used, busy = (told.memory_used_mb, reading.memory_used_mb), (told.utilization_percent, reading.utilization_percent)
    if reading.at >= told.at + SMALL_CHANGES_EVERY_S:
        return used[0] == used[1] and busy[0] == busy[1]
    return _is_near(*used, MEMORY_STEP_MB) and _is_near(*busy, UTILIZATION_STEP_PERCENT)


def _is_near(one: float | None, other: float | None, step: float) -> bool:
    return one == other if one is None or other is None else abs(one - other) < step
