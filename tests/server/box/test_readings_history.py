"""The last readings as lines: a number for each time, null where there is none, and not too many."""

from __future__ import annotations

import json
from collections import deque
from datetime import datetime, timedelta
from typing import Any

from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.server.app import create_app
from gpu_worker_pool.server.box.snapshot import MOST_POINTS, ReadingLines, Snapshot
from gpu_worker_pool.server.settings import ServerSettings
from tests.core.build import key, reading

BEGAN = datetime(2026, 3, 1, 10, 30)  # noqa: DTZ001 - as the sampler has it


def snapshot(number: int, *readings: Reading) -> Snapshot:
    return Snapshot(float(number), BEGAN + timedelta(seconds=number), readings, "simulated", len(readings))


def lines(made: ReadingLines, ring: Any) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(made.encode(list(ring)))
    return answer


def test_what_was_not_read_or_not_there_is_null() -> None:
    ring = [
        snapshot(0, reading(0, used_mb=8_000, utilization=1.234)),
        snapshot(1, reading(0, used_mb=None, utilization=None), reading(1, used_mb=80_000, utilization=100)),
    ]
    began = BEGAN.timestamp()
    assert lines(ReadingLines(100), ring) == {
        "max_history": 100,
        "measured_at": [began, began + 1],
        "gpus": {
            key(0).uuid: {"memory_percent": [10.0, None], "utilization_percent": [1.23, None]},
            key(1).uuid: {"memory_percent": [None, 100.0], "utilization_percent": [None, 100.0]},
        },
    }
    assert lines(ReadingLines(100), []) == {"max_history": 100, "measured_at": [], "gpus": {}}


def test_it_goes_on_as_the_ring_does_and_is_the_same_as_if_made_anew() -> None:
    ring: deque[Snapshot] = deque(maxlen=5)
    made = ReadingLines(5)
    for number in range(23):
        ring.append(snapshot(number, reading(0, utilization=number)))
        if number % 3 == 0 or number > 20:
            assert lines(made, ring) == lines(ReadingLines(5), ring)
            assert lines(made, ring)["gpus"][key(0).uuid]["utilization_percent"] == list(
                range(max(number - 4, 0), number + 1)
            )


def test_after_a_long_while_nothing_of_before_is_left() -> None:
    made = ReadingLines(3)
    lines(made, [snapshot(number, reading(0, utilization=1)) for number in range(3)])
    later = lines(made, [snapshot(number, reading(1, utilization=2)) for number in range(10, 13)])

    assert list(later["gpus"]) == [key(1).uuid]


def test_a_long_ring_is_put_together_by_the_highest_of_each_group_at_the_time_of_its_last() -> None:
    most = 2 * MOST_POINTS + 1
    ring = [snapshot(number, reading(0, utilization=50 if number == 4 else number % 3)) for number in range(most)]
    answer = lines(ReadingLines(most), ring)

    times = [round(at - BEGAN.timestamp()) for at in answer["measured_at"]]
    assert times[:3] == [2, 5, 8]
    assert times[-1] == most - 1
    assert len(times) <= MOST_POINTS
    assert answer["gpus"][key(0).uuid]["utilization_percent"][:3] == [2, 50, 2]


async def test_all_that_is_known_of_them_is_encoded() -> None:
    statistics = create_app(ServerSettings(_env_file=None, simulated_gpus="2")).statistics
    assert json.loads(await statistics.history())["gpus"] == []
    statistics.sampler.sample()
    first = await statistics.history()
    assert [len(gpu["readings"]) for gpu in json.loads(first)["gpus"]] == [1, 1]
    statistics.sampler.sample()
    assert [len(gpu["readings"]) for gpu in json.loads(await statistics.history())["gpus"]] == [2, 2]
