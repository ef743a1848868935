"""What waiters hold, so that a stream of narrow requests starves nobody."""

from __future__ import annotations

from gpu_worker_pool.core.model import events as ev
from tests.core.build import T4, Box, key, of_kind, reading
from tests.core.queue.boxes import free_at_once, held_for

# --- wide requests do not starve -----------------------------------------------------------------------------------


def test_a_wide_waiter_holds_the_free_gpus_it_could_use() -> None:
    box = free_at_once(reading(0), reading(1))
    box.ask("holder")

    box.ask("wide", gpus=2)

    assert held_for(box, "wide") == {key(1)}


def test_nobody_later_takes_what_a_wide_waiter_holds() -> None:
    box = free_at_once(reading(0), reading(1))
    box.ask("holder")
    box.ask("wide", gpus=2)

    box.ask("narrow")

    assert box.stage("narrow") == "queued"


def test_no_later_share_joins_what_a_wide_waiter_holds() -> None:
    box = free_at_once(reading(0), reading(1))
    box.ask("holder")
    box.ask("wide", gpus=2)

    box.ask("share", memory_mb=1_000)

    assert box.stage("share") == "queued"


def test_a_stream_of_narrow_requests_does_not_starve_a_wide_one() -> None:
    box = free_at_once(*(reading(index) for index in range(4)))
    for number in range(4):
        box.ask(f"n{number}")
    box.ask("wide", gpus=4)
    for number in range(4):
        box.ask(f"n{number + 4}")
        box.release(f"n{number}")

    assert len(box.gpus_of("wide")) == 4


def test_a_wide_waiter_keeps_what_frees_up_one_by_one() -> None:
    box = free_at_once(*(reading(index) for index in range(3)))
    for number in range(3):
        box.ask(f"n{number}")
    box.ask("wide", gpus=3)
    box.release("n0")
    box.release("n1")

    assert held_for(box, "wide") == {key(0), key(1)}


def test_a_narrow_waiter_behind_a_wide_one_is_served_after_it() -> None:
    box = free_at_once(*(reading(index) for index in range(4)))
    box.ask("h1")
    box.ask("h2")
    box.ask("h3")
    box.ask("wide", gpus=3)
    box.ask("narrow")
    box.release("h1")
    assert box.stage("narrow") == "queued"

    box.release("h2")

    assert len(box.gpus_of("wide")) == 3
    box.release("h3")
    assert box.stage("narrow") == "active"


def test_a_higher_priority_takes_what_a_wide_waiter_holds() -> None:
    box = free_at_once(reading(0), reading(1))
    box.ask("holder")
    box.ask("wide", gpus=2)

    box.ask("urgent", priority=1)

    assert box.gpus_of("urgent") == (key(1),)
    assert held_for(box, "wide") == set()


def test_a_wide_waiter_holds_where_it_can_use_the_most() -> None:
    box = free_at_once(
        *(reading(index, node="x", utilization=95 if index < 3 else 0) for index in range(4)),
        *(reading(index, node="y", utilization=95 if index < 2 else 0) for index in range(4)),
    )

    box.ask("wide", gpus=3)

    assert held_for(box, "wide") == {key(2, "y"), key(3, "y")}


def test_somebody_later_passes_onto_a_node_where_no_earlier_waiter_holds() -> None:
    box = free_at_once(
        *(reading(index, node="x", utilization=95 if index < 3 else 0) for index in range(4)),
        *(reading(index, node="y", utilization=95 if index < 2 else 0) for index in range(4)),
    )
    box.ask("wide", gpus=3)

    box.ask("narrow")

    assert box.gpus_of("narrow") == (key(3, "x"),)


def test_of_nodes_alike_a_wide_waiter_holds_on_the_first_by_name() -> None:
    box = free_at_once(
        *(reading(index, node="y", utilization=95 * (index == 0)) for index in range(2)),
        *(reading(index, node="x", utilization=95 * (index == 0)) for index in range(2)),
    )

    box.ask("wide", gpus=2)

    assert held_for(box, "wide") == {key(1, "x")}


def test_of_nodes_where_it_can_use_as_many_it_is_the_first_by_name_even_if_another_has_more_open() -> None:
    box = free_at_once(
        *(reading(index, node="x", utilization=95 * (index == 0)) for index in range(3)),
        *(reading(index, node="y", utilization=50 * (index == 0)) for index in range(3)),
    )

    box.ask("wide", gpus=3, utilization_threshold_percent=40)

    assert held_for(box, "wide") == {key(1, "x"), key(2, "x")}


def test_a_wide_waiter_does_not_hold_on_a_node_that_has_too_few_gpus_for_it() -> None:
    box = free_at_once(
        *(reading(index, node="large", utilization=95 if index < 3 else 0) for index in range(4)),
        *(reading(index, node="small") for index in range(2)),
    )

    box.ask("wide", gpus=3)

    assert held_for(box, "wide") == {key(3, "large")}


def test_a_wide_request_does_not_starve_because_a_smaller_node_has_more_free() -> None:
    box = free_at_once(
        *(reading(index, node="large") for index in range(3)),
        *(reading(index, node="small") for index in range(2)),
    )
    box.ask("small", gpus=2)
    for number in range(3):
        box.ask(f"n{number}")
    box.release("small")
    box.ask("wide", gpus=3)
    for number in range(3):
        box.ask(f"n{number + 3}")
        box.ask(f"n{number + 6}")
        box.release(f"n{number}")

    assert {gpu.node for gpu in box.gpus_of("wide")} == {"large"}


def test_a_request_that_no_node_could_ever_serve_holds_nothing() -> None:
    box = free_at_once()
    box.ask("impossible", gpus=100)  # before the first look nobody can tell
    box.observe_now(reading(0), reading(1))

    box.ask("narrow")

    assert box.stage("narrow") == "active"


def test_two_wide_waiters_hold_different_gpus() -> None:
    box = free_at_once(
        *(reading(index, node="x", utilization=95 * (index == 0)) for index in range(3)),
        *(reading(index, node="y", utilization=95 * (index == 0)) for index in range(2)),
    )
    box.ask("wide", gpus=3)
    box.ask("wide too", gpus=2)

    assert held_for(box, "wide") == {key(1, "x"), key(2, "x")}
    assert held_for(box, "wide too") == {key(1, "y")}


def test_a_wide_waiter_who_leaves_gives_what_it_held_to_the_next() -> None:
    box = free_at_once(reading(0), reading(1))
    box.ask("holder")
    box.ask("wide", gpus=2)
    box.ask("narrow")

    box.release("wide")

    assert box.gpus_of("narrow") == (key(1),)


def test_a_wide_waiter_who_leaves_the_middle_of_the_line_gives_what_it_held_to_the_next() -> None:
    box = free_at_once(reading(0), reading(1), reading(2, name=T4))
    box.ask("on the T4", model="T4")
    box.ask("on an A100", model="A100")
    box.ask("front", model="T4")
    box.ask("wide", model="A100", gpus=2)
    box.ask("narrow", model="A100")

    box.release("wide")

    assert box.gpus_of("narrow") == (key(1),)


def test_a_wide_waiter_whose_time_is_over_gives_what_it_held_to_the_next() -> None:
    box = free_at_once(reading(0), reading(1))
    box.ask("holder")
    box.ask("wide", gpus=2, ttl_s=10)
    box.ask("narrow")

    box.pass_time(10)

    assert box.gpus_of("narrow") == (key(1),)


def test_a_wide_waiter_holds_nothing_that_it_could_not_use() -> None:
    box = free_at_once(reading(0), reading(1, used_mb=40_000), reading(2))
    box.ask("holder")  # on GPU 0
    box.ask("wide", gpus=3, memory_threshold_percent=30)

    box.ask("narrow", memory_threshold_percent=60, model="A100", utilization_threshold_percent=50)

    assert box.gpus_of("narrow") == (key(1),)


def test_what_a_wide_waiter_holds_is_let_go_when_it_can_no_longer_be_used() -> None:
    box = free_at_once(reading(0), reading(1))
    box.ask("holder")
    box.ask("wide", gpus=2)

    box.observe_now(reading(1, utilization=95))

    assert held_for(box, "wide") == set()


def test_what_a_wide_waiter_holds_is_let_go_when_its_reading_grows_stale() -> None:
    box = free_at_once(reading(0), reading(1))
    box.ask("holder")
    box.ask("wide", gpus=2)

    box.pass_time(16)

    assert held_for(box, "wide") == set()


def test_a_newcomer_in_the_middle_takes_what_somebody_behind_it_holds() -> None:
    box = free_at_once(reading(0), reading(1), reading(2, name=T4))
    box.ask("on the T4", model="T4")
    box.ask("on an A100", model="A100")
    box.ask("front", model="T4", priority=9)
    box.ask("wide", model="A100", gpus=2)
    assert held_for(box, "wide") == {key(1)}

    box.ask("middle", model="A100", priority=5)

    assert box.gpus_of("middle") == (key(1),)
    assert held_for(box, "wide") == set()


def test_a_wide_newcomer_in_the_middle_holds_before_those_behind_it() -> None:
    box = free_at_once(reading(0), reading(1), reading(2, name=T4))
    box.ask("on the T4", model="T4")
    box.ask("on an A100", model="A100")
    box.ask("front", model="T4", priority=9)
    box.ask("wide", model="A100", gpus=2)

    box.ask("middle", model="A100", gpus=2, priority=5)

    assert (held_for(box, "middle"), held_for(box, "wide")) == ({key(1)}, set())


# --- the first in the line also holds what others share ------------------------------------------------------------


def test_a_stream_of_small_shares_does_not_keep_an_exclusive_waiter_out() -> None:
    box = free_at_once(reading())
    box.ask("s0", memory_mb=8_000)
    box.ask("alone")
    for number in range(1, 5):
        box.ask(f"s{number}", memory_mb=8_000)

    box.release("s0")

    assert box.gpus_of("alone") == (key(),)


def test_a_stream_of_small_shares_does_not_keep_a_large_share_out() -> None:
    box = free_at_once(reading())
    box.ask("s0", memory_mb=8_000)
    box.ask("large", memory_mb=60_000)
    box.ask("s1", memory_mb=8_000)
    assert box.stage("s1") == "queued"

    box.release("s0")

    assert (box.stage("large"), box.stage("s1")) == ("active", "queued")


def test_the_first_in_the_line_holds_only_one_of_several_shared_gpus_where_one_will_do() -> None:
    box = free_at_once(reading(0), reading(1))
    box.ask("s0", memory_mb=60_000)
    box.ask("s1", memory_mb=40_000)
    box.ask("alone")

    assert held_for(box, "alone") == {key(1)}


def test_the_first_in_the_line_holds_the_least_committed_shared_gpu() -> None:
    box = free_at_once(reading(0), reading(1))
    box.ask("s0", memory_mb=40_000)
    box.ask("s1", memory_mb=60_000)
    box.ask("alone")

    assert held_for(box, "alone") == {key(0)}


def test_others_go_on_sharing_the_gpus_that_the_first_in_the_line_does_not_hold() -> None:
    box = free_at_once(reading(0), reading(1))
    box.ask("s0", memory_mb=40_000)
    box.ask("s1", memory_mb=50_000)
    box.ask("alone")

    box.ask("s2", memory_mb=8_000)

    assert box.gpus_of("s2") == (key(1),)


def test_the_first_in_the_line_holds_no_shared_gpu_of_another_model() -> None:
    box = free_at_once(reading(0), reading(1, name=T4))
    box.ask("s0", memory_mb=8_000, model="T4")
    box.ask("s1", memory_mb=50_000, model="A100")

    box.ask("alone", model="A100")

    assert held_for(box, "alone") == {key(0)}


def test_only_the_first_in_the_line_holds_what_others_share() -> None:
    box = free_at_once(reading(0), reading(1))
    box.ask("s0", memory_mb=40_000)
    box.ask("s1", memory_mb=50_000)
    box.ask("alone")
    box.ask("alone too")

    assert held_for(box, "alone too") == set()


def test_only_the_first_in_the_line_holds_what_others_share_when_the_whole_line_is_gone_through() -> None:
    box = free_at_once(reading(0), reading(1))
    box.ask("s0", memory_mb=40_000)
    box.ask("s1", memory_mb=50_000)
    box.ask("alone")
    box.ask("alone too")

    events = box.observe_now(reading(1, utilization=1))

    assert of_kind(events, ev.QueueSettled) == [ev.QueueSettled(box.now, float("inf"), ((key(0), "alone"),), "alone")]


def test_a_wide_first_in_the_line_holds_free_and_shared_gpus_of_one_node_up_to_its_number() -> None:
    box = free_at_once(reading(0), reading(1), reading(2), reading(3))
    box.ask("holder")  # GPU 0
    box.ask("s0", memory_mb=40_000)  # GPU 1
    box.ask("s1", memory_mb=40_000)  # GPU 2
    box.ask("wide", gpus=2)  # GPU 3 and another: cannot be served

    assert held_for(box, "wide") == {key(3), key(1)}


def test_a_wide_first_in_the_line_holds_shared_gpus_where_nothing_is_free() -> None:
    box = free_at_once(reading(0), reading(1))
    box.ask("s0", memory_mb=40_000)
    box.ask("s1", memory_mb=40_000)

    box.ask("wide", gpus=2)

    assert held_for(box, "wide") == {key(0), key(1)}


def test_a_wide_first_in_the_line_does_not_hold_a_shared_gpu_of_a_node_that_is_too_small_for_it() -> None:
    box = free_at_once(reading(0, node="small"), reading(0, node="large"), reading(1, node="large"))
    box.ask("s0", memory_mb=50_000)
    box.ask("s1", memory_mb=60_000)
    box.ask("s2", memory_mb=60_000)
    assert box.gpus_of("s0") == (key(0, "small"),)

    box.ask("wide", gpus=2)

    assert held_for(box, "wide") == {key(0, "large"), key(1, "large")}


def test_no_draining_gpu_needs_to_be_held() -> None:
    box = Box(reading())
    box.ask("s0", memory_mb=8_000)
    box.release("s0")

    box.ask("alone")

    assert held_for(box, "alone") == set()


def test_who_becomes_first_in_the_line_holds_what_others_share_then() -> None:
    box = free_at_once(reading(0), reading(1))
    box.ask("s0", memory_mb=40_000)
    box.ask("s1", memory_mb=50_000)
    box.ask("alone")
    box.ask("alone too")

    box.release("alone")

    assert held_for(box, "alone too") == {key(0)}


def test_who_can_be_served_only_when_sharers_leave_need_not_be_first_to_keep_them_from_growing() -> None:
    box = free_at_once(reading(0), reading(1, name=T4))
    box.ask("on the T4", model="T4")
    box.ask("s0", memory_mb=40_000)
    box.ask("front", model="T4")

    box.ask("alone", model="A100")

    assert held_for(box, "alone") == {key(0)}
