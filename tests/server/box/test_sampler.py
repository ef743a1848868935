"""The sampler's thread encodes what is polled, so that the event loop need not."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

from gpu_worker_pool.gpus.simulated import SimulatedProbe
from gpu_worker_pool.server.box.sampler import Sampler
from gpu_worker_pool.server.box.snapshot import BodyName, Snapshot


def sampler_of(gpus: int) -> Sampler:
    seconds = map(float, count())
    return Sampler(
        lambda: SimulatedProbe("box", str(gpus)),
        interval_s=1.0,
        max_history=5,
        visible_devices=None,
        clock=lambda: next(seconds),
    )


def encoded(snapshot: Snapshot) -> set[str]:
    """The bodies that it has already."""
    return {name for name in vars(snapshot) if name.endswith("_body")}


def asked(snapshot: Snapshot, name: BodyName) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(snapshot.ask(name))
    return answer


def test_a_body_that_was_asked_for_is_encoded_with_the_next_sample_and_no_longer_than_it_is_asked_for() -> None:
    sampler = sampler_of(3)
    sampler.sample()
    assert encoded(sampler.snapshot) == set(), "nobody asked"
    first = sampler.snapshot
    polled: tuple[BodyName, ...] = ("stats_body", "summary_body")
    bodies = {name: asked(first, name) for name in polled}
    assert [gpu["gpu_id"] for gpu in bodies["stats_body"]["gpus"]] == [0, 1, 2]
    assert [gpu["gpu_id"] for gpu in bodies["summary_body"]["gpus_summary"]] == [0, 1, 2]

    sampler.sample()
    assert encoded(sampler.snapshot) == {"stats_body", "summary_body"}
    for name, body in bodies.items():
        assert asked(sampler.snapshot, name)["timestamp"] > body["timestamp"]

    sampler.sample(for_history=False)
    assert encoded(sampler.snapshot) == set(), "a waiter is in a hurry"
    sampler.sample()
    assert encoded(sampler.snapshot) == set(), "nobody asked for the last one"
