"""A pool that goes on from an old copy grants nothing that it may have granted since."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.core.decider.condense import FENCES_AHEAD, condense, put_back
from gpu_worker_pool.core.model.gpu import Reading
from tests.core.build import START, Box, key, reading

READINGS = (reading(0), reading(1), reading(2))


def put_back_box(box: Box, *readings: Reading) -> Box:
    """The box, begun again with the history that a copy of its journal is put back with. Its server has read these GPUs."""
    box.log = [*put_back(box.state, "restored")]
    box.restart()
    box.observe_now(*readings)
    return box


def test_the_leases_and_the_order_of_the_queue_are_those_of_the_copy() -> None:
    box = Box(*READINGS)
    for lease_id, gpus in (("a", 2), ("b", 2), ("c", 1), ("d", 3)):
        box.ask(lease_id, gpus=gpus)
    before = {lease_id: box.stage(lease_id) for lease_id in "abcd"}

    put_back_box(box, *READINGS)

    assert {lease_id: box.stage(lease_id) for lease_id in "abcd"} == before
    assert (box.fence_of("a"), list(box.state.queue)) == (1, ["b", "d"])
    assert box.state.clock == START


def test_gpus_are_out_of_service_when_they_are_first_seen_until_all_that_were_read_are_in_service() -> None:
    box = put_back_box(Box())
    box.observe_now(reading(0), reading(1))
    box.include(key(0))
    box.restart()
    box.observe_now(*READINGS)
    assert set(box.state.excluded) == {key(1), key(2)}

    box.include(key(1))
    box.include(key(2))
    box.restart()
    box.observe_now(*READINGS, reading(3))

    assert not box.state.excluded


def test_a_gpu_that_was_out_of_service_before_does_not_keep_new_ones_out_for_ever() -> None:
    box = Box(reading(0), reading(1))
    box.exclude(key(0), "its fan is broken")
    put_back_box(box, reading(0), reading(1))
    box.include(key(1))

    box.observe_now(*READINGS)

    assert set(box.state.excluded) == {key(0)}


gpus = st.sets(st.integers(0, 4))


@given(gpus, st.lists(st.tuples(st.sampled_from(["read", "include", "restart", "compact"]), gpus), max_size=12))
def test_a_gpu_is_granted_only_after_an_operator_has_spoken_of_it(
    known: set[int], steps: list[tuple[str, set[int]]]
) -> None:
    """Or of all GPUs that its server had read by then, if that GPU was not among them."""
    box = put_back_box(Box(*map(reading, sorted(known))))
    out, seen, read, holds = set(known), set(known), set[int](), True
    for number, (action, some) in enumerate(steps):
        if action == "read":
            box.observe_now(*map(reading, sorted(some)))
            out |= some - seen if holds else set()
            seen |= some
            read |= some
        elif action == "include":
            for index in sorted(some & seen):
                box.include(key(index))
                holds = holds and out & read != {index}
                out.discard(index)
        else:
            if action == "compact":
                box.log = [*condense(box.state)]
            box.restart()
            read = set()
        box.ask(f"lease{number}")
        assert {key(index) for index in out} == set(box.state.excluded)
        assert all(box.state.excluded.keys().isdisjoint(box.gpus_of(lease_id)) for lease_id in box.state.leases)


def test_a_gpu_that_was_out_of_service_keeps_its_reason() -> None:
    box = Box(*READINGS)
    box.exclude(key(0), "its fan is broken")

    put_back_box(box, *READINGS)

    assert [box.state.excluded[key(index)] for index in range(3)] == ["its fan is broken", "restored", "restored"]


def test_fences_are_above_all_that_were_given_since_the_copy() -> None:
    box = Box(*READINGS)
    box.ask("a")
    put_back_box(put_back_box(box), *READINGS)
    for index in range(3):
        box.include(key(index))

    box.ask("new")

    assert box.fence_of("new") == 2 * FENCES_AHEAD + 2
