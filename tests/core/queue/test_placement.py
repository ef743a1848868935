"""Which of the eligible GPUs is taken."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.build import A100, T4, Box, key, process, reading

# --- one GPU -------------------------------------------------------------------------------------------------------


def test_one_gpu_is_the_one_with_the_least_memory_and_utilization_together() -> None:
    box = Box(
        reading(0, used_mb=0, utilization=50),
        reading(1, used_mb=16_000, utilization=10),
        reading(2, used_mb=40_000, utilization=0),
    )

    box.ask("a")

    assert box.gpus_of("a") == (key(1),)


def test_of_equals_it_is_on_the_node_with_the_fewest_open() -> None:
    box = Box(
        *(reading(index, node="large") for index in range(3)),
        *(reading(index, node="small") for index in range(2)),
    )

    box.ask("a")

    assert box.gpus_of("a") == (key(0, "small"),)


def test_of_equals_on_one_node_it_is_the_first_by_index() -> None:
    box = Box(reading(10), reading(9), reading(2))

    box.ask("a")

    assert box.gpus_of("a") == (key(2),)


def test_of_equals_on_nodes_alike_it_is_the_first_by_name() -> None:
    box = Box(reading(node="y"), reading(node="x"))

    box.ask("a")

    assert box.gpus_of("a") == (key(0, "x"),)


def test_only_the_wished_for_model_is_taken() -> None:
    box = Box(reading(0, name=A100), reading(1, name="NVIDIA A10", utilization=50))

    box.ask("a", model="A10")

    assert box.gpus_of("a") == (key(1),)


def test_ignored_memory_does_not_count_as_use_in_the_choice() -> None:
    box = Box(
        reading(0, used_mb=8_000, processes=(process(66, 8_000),)),
        reading(1, used_mb=16_000, processes=(process(67, 16_000, name="Xorg"),)),
    )
    box.ignore("Xorg")

    box.ask("a")

    assert box.gpus_of("a") == (key(1),)


def test_a_gpu_below_the_pools_thresholds_is_preferred_by_who_would_take_others_too() -> None:
    box = Box(reading(0, utilization=95), reading(1, utilization=80))

    box.ask("a", utilization_threshold_percent=99)

    assert box.gpus_of("a") == (key(1),)


def test_thirty_two_workers_who_ask_at_once_get_as_many_different_gpus_as_there_are() -> None:
    box = Box(*(reading(index) for index in range(8)))
    for number in range(32):
        box.ask(f"w{number}")

    granted = [box.gpus_of(f"w{number}") for number in range(32)]

    assert granted[:8] == [(key(index),) for index in range(8)]
    assert granted[8:] == [()] * 24


# --- one share -----------------------------------------------------------------------------------------------------


def test_a_share_goes_where_it_fits_tightest() -> None:
    box = Box(reading(0), reading(1), reading(2, total_mb=40_000))
    box.ask("a", memory_mb=40_000)  # too large for GPU 2
    box.ask("b", memory_mb=10_000)  # leaves 14,000 beside a, 22,000 on GPU 2

    assert box.gpus_of("b") == box.gpus_of("a")


def test_a_share_that_does_not_fit_beside_others_takes_a_whole_gpu() -> None:
    box = Box(reading(0), reading(1))
    box.ask("a", memory_mb=40_000)
    box.ask("b", memory_mb=30_000)

    assert (box.gpus_of("a"), box.gpus_of("b")) == ((key(0),), (key(1),))


def test_a_share_breaks_no_whole_gpu_while_it_fits_beside_others_however_loosely() -> None:
    box = Box(reading(0, name=T4, total_mb=16_000), reading(1, name=A100))
    box.ask("a", memory_mb=20_000)  # too large for the T4
    box.ask("b", memory_mb=4_000)  # leaves 40,000 beside a, 8,800 on the T4

    assert box.gpus_of("b") == box.gpus_of("a") == (key(1),)


def test_a_share_that_must_break_a_whole_gpu_takes_it_on_the_node_with_the_fewest_open() -> None:
    box = Box(
        *(reading(index, node="large") for index in range(3)),
        *(reading(index, node="small") for index in range(2)),
    )

    box.ask("a", memory_mb=40_000)

    assert box.gpus_of("a") == (key(0, "small"),)


def test_shares_fill_a_node_before_they_break_into_the_next() -> None:
    box = Box(*(reading(index, node=node) for node in ("x", "y") for index in range(4)))

    for number in range(5):
        box.ask(f"s{number}", memory_mb=40_000)

    assert [box.gpus_of(f"s{number}")[0].node for number in range(5)] == ["x"] * 4 + ["y"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 24), min_size=1, max_size=24), st.sampled_from((8, 16, 32)))
def test_shares_are_placed_as_best_fit_places_them(asked_gb: list[int], total_gb: int) -> None:
    """Nowhere is a worse fit taken than there is, and no whole GPU while a shared one has the room."""
    box = Box(*(reading(index, total_mb=total_gb * 1_000) for index in range(8)))
    limit_gb = total_gb * 0.8
    bins: list[float] = []
    for number, gb in enumerate(asked_gb):
        box.ask(f"s{number}", memory_mb=gb * 1_000)
        granted = box.gpus_of(f"s{number}")
        if gb > limit_gb or box.state.queue:
            return  # from here on the line decides
        fits = [used for used in bins if used + gb <= limit_gb]
        beside = max(fits, default=0.0)
        there = sum(other for n, other in enumerate(asked_gb[:number]) if box.gpus_of(f"s{n}") == granted)
        assert there == beside
        if fits:
            bins.remove(beside)
        bins.append(beside + gb)


def test_a_small_gpu_is_preferred_for_a_small_share() -> None:
    box = Box(reading(0, name=A100), reading(1, name=T4, total_mb=16_000))

    box.ask("a", memory_mb=4_000)

    assert box.gpus_of("a") == (key(1),)


def test_a_share_of_a_model_skips_tighter_fits_of_another() -> None:
    box = Box(reading(0, name=A100), reading(1, name=T4, total_mb=16_000))

    box.ask("a", memory_mb=4_000, model="A100")

    assert box.gpus_of("a") == (key(0),)


# --- several GPUs --------------------------------------------------------------------------------------------------


def test_several_gpus_are_all_on_one_node() -> None:
    box = Box(reading(0, node="x"), reading(0, node="y"), reading(1, node="y"))

    box.ask("a", gpus=2)

    assert box.gpus_of("a") == (key(0, "y"), key(1, "y"))


def test_several_gpus_are_granted_all_or_none() -> None:
    box = Box(reading(0), reading(1))
    box.ask("a")

    box.ask("b", gpus=2)

    assert box.gpus_of("b") == ()


def test_several_gpus_are_on_the_node_with_the_fewest_that_has_enough() -> None:
    box = Box(
        *(reading(index, node="large") for index in range(4)),
        *(reading(index, node="middle") for index in range(2)),
        *(reading(index, node="small") for index in range(1)),
    )

    box.ask("a", gpus=2)

    assert box.gpus_of("a") == (key(0, "middle"), key(1, "middle"))


def test_several_gpus_are_of_one_model_where_possible() -> None:
    box = Box(reading(0, name=T4), reading(1, utilization=50), reading(2, utilization=50), reading(3, name="L4"))

    box.ask("a", gpus=2)

    assert box.gpus_of("a") == (key(1), key(2))


def test_several_gpus_are_of_the_model_with_the_fewest() -> None:
    box = Box(reading(0), reading(1), reading(2), reading(3, name=T4), reading(4, name=T4))

    box.ask("a", gpus=2)

    assert box.gpus_of("a") == (key(3), key(4))


def test_of_two_models_with_as_many_the_less_used_is_taken() -> None:
    box = Box(reading(0, utilization=20), reading(1), reading(2, name=T4, utilization=10), reading(3, name=T4))

    box.ask("a", gpus=2)

    assert box.gpus_of("a") == (key(2), key(3))


def test_models_are_mixed_where_none_has_enough() -> None:
    box = Box(reading(0), reading(1, name=T4), reading(2, name="L4", utilization=50))

    box.ask("a", gpus=2)

    assert box.gpus_of("a") == (key(0), key(1))


def test_of_more_than_enough_of_a_model_the_least_used_are_taken_by_index() -> None:
    box = Box(reading(0, utilization=5), reading(1, utilization=50), reading(2), reading(3, utilization=60))

    box.ask("a", gpus=2)

    assert box.gpus_of("a") == (key(0), key(2))


def test_several_shares_go_where_the_least_room_is_left() -> None:
    box = Box(reading(0), reading(1), reading(2))
    box.ask("a", memory_mb=8_000)
    box.ask("b", gpus=2, memory_mb=8_000)

    assert box.gpus_of("b") == (key(0), key(1))


def test_several_shares_are_on_different_gpus() -> None:
    box = Box(reading(0), reading(1))

    box.ask("a", gpus=2, memory_mb=1_000)

    assert box.gpus_of("a") == (key(0), key(1))


def test_several_gpus_of_a_node_with_a_busy_one_leave_that_out() -> None:
    box = Box(reading(0), reading(1, utilization=95), reading(2))

    box.ask("a", gpus=2)

    assert box.gpus_of("a") == (key(0), key(2))


def test_a_node_with_enough_open_but_too_few_of_them_usable_is_passed_over() -> None:
    box = Box(
        reading(0, node="x"),
        reading(1, node="x", utilization=50),
        *(reading(index, node="y") for index in range(3)),
    )

    box.ask("a", gpus=2, utilization_threshold_percent=40)

    assert box.gpus_of("a") == (key(0, "y"), key(1, "y"))


def test_several_busy_gpus_will_do_for_who_says_so() -> None:
    box = Box(reading(0, utilization=95), reading(1, utilization=95))

    box.ask("a", gpus=2, utilization_threshold_percent=99)

    assert box.gpus_of("a") == (key(0), key(1))


def test_a_node_whose_open_gpus_are_of_another_model_is_passed_over() -> None:
    box = Box(
        *(reading(index, node="x", name=T4) for index in range(2)),
        *(reading(index, node="y", name=A100) for index in range(3)),
    )

    box.ask("a", gpus=2, model="A100")

    assert box.gpus_of("a") == (key(0, "y"), key(1, "y"))


def indices(box: Box, lease_id: str) -> list[str]:
    return [gpu.uuid[-1] for gpu in box.gpus_of(lease_id)]


def test_several_gpus_are_neighbours() -> None:
    box = Box(*(reading(index) for index in range(8)))
    for name in "abcdefgh":
        box.ask(name)
    for name in "bcefgh":  # 1, 2, 4, 5, 6, 7 are free
        box.release(name)
    box.pass_time(0.1)
    box.observe_now(*(reading(index) for index in range(8)))

    box.ask("four", gpus=4)

    assert indices(box, "four") == ["4", "5", "6", "7"]


def test_of_equal_choices_the_one_is_taken_that_leaves_the_longest_run() -> None:
    box = Box(*(reading(index) for index in range(8)))
    box.ask("in the way", among=("4",))

    box.ask("three", gpus=3)  # 5 to 7 are just enough; 0 to 3 stay together
    box.ask("four", gpus=4)

    assert indices(box, "three") == ["5", "6", "7"]
    assert indices(box, "four") == ["0", "1", "2", "3"]


def test_a_gpu_in_use_is_no_better_for_being_a_neighbour() -> None:
    box = Box(reading(0), reading(1, used_mb=40_000, processes=None), reading(2), reading(3))

    box.ask("two", gpus=2)

    assert indices(box, "two") == ["2", "3"]


# --- islands of GPUs with fast links: the position of each, by index ------------------------------------------------


def islands(*positions: int | None, busy: tuple[int, ...] = ()) -> Box:
    return Box(*(reading(i, position=each, utilization=95 if i in busy else 0) for i, each in enumerate(positions)))


def test_several_gpus_are_on_one_island() -> None:
    box = islands(0, 1, 0, 1, 0, 1, 0, 1)

    box.ask("four", gpus=4)

    assert indices(box, "four") == ["0", "2", "4", "6"]


def test_they_are_on_the_island_with_the_fewest_free_gpus_that_has_enough() -> None:
    box = islands(0, 1, 0, 1, 0, 1, 0, 1, busy=(3,))

    box.ask("three", gpus=3)
    box.ask("four", gpus=4)

    assert indices(box, "three") == ["1", "5", "7"]
    assert indices(box, "four") == ["0", "2", "4", "6"]


def test_a_gpu_in_use_between_two_of_an_island_does_not_part_them() -> None:
    box = islands(0, 0, 0, 1, 1, 1, busy=(1,))

    box.ask("two", gpus=2)

    assert indices(box, "two") == ["0", "2"]


def test_islands_of_an_island_are_closer_than_others() -> None:
    """Pairs on a PCIe switch, two of them on a NUMA node; one GPU of each pair is in use, and a whole pair."""
    box = islands(0, 0, 1, 1, 3, 3, 4, 4, busy=(0, 2, 3))

    box.ask("three", gpus=3)

    assert indices(box, "three") == ["4", "5", "6"]


def test_more_than_an_island_has_come_from_the_nearest_ones() -> None:
    box = islands(0, 0, 1, 1, 3, 3, 4, 4)

    box.ask("four", gpus=4)
    box.ask("three", gpus=3)

    assert indices(box, "four") == ["0", "1", "2", "3"]
    assert indices(box, "three") == ["4", "5", "6"]


def test_positions_that_are_told_later_change_the_choice() -> None:
    box = islands(None, None, None, None)
    box.observe_now(*(reading(index, position=index % 2) for index in range(4)))

    box.ask("two", gpus=2)

    assert indices(box, "two") == ["0", "2"]
