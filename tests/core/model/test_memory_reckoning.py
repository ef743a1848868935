"""Sharing without double counting: each lease counts as what it asked for or what it uses, whichever is more."""

from __future__ import annotations

from gpu_worker_pool.core.model.slot import MemoryUse, memory_use, used_percent
from gpu_worker_pool.core.queue.verdicts import verdict
from tests.core.build import Box, configured, key, process, reading


def use_of(box: Box) -> MemoryUse:
    use = memory_use(box.state.slots[key()], box.state.ignored_processes)
    assert use is not None
    return use


def sharing(asked_mb: float = 10_000, *, pid: int | None = 7) -> Box:
    """One A100 with one share on it."""
    box = Box(reading())
    box.ask("a", memory_mb=asked_mb, pid=pid)
    box.pass_time(1.0)  # what is read from now on may be its own
    return box


# --- each lease once -----------------------------------------------------------------------------------------------


def test_a_lease_that_uses_nothing_yet_counts_as_what_it_asked_for() -> None:
    assert use_of(sharing(10_000)).by_lease == {"a": 10_000}


def test_what_a_lease_asked_for_and_what_it_uses_are_not_added_together() -> None:
    box = sharing(10_000)
    box.observe_now(reading(used_mb=6_000, processes=(process(7, 6_000),)))

    assert use_of(box) == MemoryUse({"a": 10_000}, outside_mb=0.0)


def test_a_lease_that_uses_more_than_it_asked_for_counts_as_what_it_uses() -> None:
    box = sharing(10_000)
    box.observe_now(reading(used_mb=16_000, processes=(process(7, 16_000),)))

    assert use_of(box) == MemoryUse({"a": 16_000}, outside_mb=0.0)


def test_the_processes_of_a_lease_are_added_up() -> None:
    box = sharing(10_000)
    crowd = (process(7, 6_000), process(8, 6_000, parents=(7,)), process(9, 6_000, parents=(8, 7)))
    box.observe_now(reading(used_mb=18_000, processes=crowd))

    assert use_of(box).by_lease == {"a": 18_000}


def test_memory_that_belongs_to_no_lease_is_added() -> None:
    box = sharing(10_000)
    box.observe_now(reading(used_mb=9_000, processes=(process(7, 6_000), process(66, 3_000))))

    use = use_of(box)

    assert (use.by_lease, use.outside_mb, use.committed_mb) == ({"a": 10_000}, 3_000, 13_000)


def test_memory_that_no_process_accounts_for_is_outside() -> None:
    box = sharing(10_000)
    box.observe_now(reading(used_mb=6_700, processes=(process(7, 6_000),)))

    assert use_of(box).outside_mb == 700


def test_processes_that_account_for_more_than_is_used_do_not_make_room() -> None:
    box = sharing(10_000)
    box.observe_now(reading(used_mb=5_000, processes=(process(7, 6_000),)))

    assert use_of(box).outside_mb == 0.0


def test_leases_on_one_gpu_are_added_up_each_by_itself() -> None:
    box = sharing(10_000)
    box.ask("b", memory_mb=10_000, pid=8)
    box.observe_now(reading(used_mb=19_000, processes=(process(7, 4_000), process(8, 15_000))))

    assert use_of(box) == MemoryUse({"a": 10_000, "b": 15_000}, outside_mb=0.0)


def test_two_leases_of_one_process_are_not_counted_twice() -> None:
    box = sharing(10_000, pid=7)
    box.ask("b", memory_mb=10_000, pid=7)
    box.observe_now(reading(used_mb=20_000, processes=(process(7, 20_000),)))

    assert use_of(box).committed_mb == 20_000


def test_a_process_belongs_to_its_own_lease_before_that_of_its_parent() -> None:
    box = sharing(10_000, pid=7)
    box.ask("b", memory_mb=10_000, pid=8)
    crowd = (process(7, 5_000), process(8, 10_000, parents=(7,)))
    box.observe_now(reading(used_mb=15_000, processes=crowd))

    assert use_of(box) == MemoryUse({"a": 10_000, "b": 10_000}, outside_mb=0.0)


# --- room ----------------------------------------------------------------------------------------------------------


def test_a_share_that_just_fits_is_granted() -> None:
    box = sharing(32_000)

    box.ask("b", memory_mb=32_000)

    assert box.gpus_of("b") == (key(),)


def test_a_share_that_is_too_much_by_one_megabyte_waits() -> None:
    box = sharing(32_000)

    box.ask("b", memory_mb=32_001)

    assert box.stage("b") == "queued"
    assert box.verdict(memory_mb=32_001) == verdict(
        "no_room", committed_mb=32_000, asked_mb=32_001, limit_mb=64_000, holders=("a",)
    )


def test_the_memory_of_people_outside_the_pool_leaves_less_room() -> None:
    box = Box(reading(used_mb=40_000, processes=(process(66, 40_000),)))

    assert box.verdict(memory_mb=24_001) == verdict(
        "no_room", committed_mb=40_000, asked_mb=24_001, limit_mb=64_000, holders=()
    )


def test_a_request_with_a_threshold_of_its_own_has_its_own_room() -> None:
    box = sharing(32_000)

    assert box.verdict(memory_mb=40_000, memory_threshold_percent=90).is_eligible


def test_a_lease_that_grows_beyond_what_it_asked_for_keeps_others_out() -> None:
    box = sharing(10_000)
    box.observe_now(reading(used_mb=60_000, processes=(process(7, 60_000),)))

    box.ask("b", memory_mb=8_000)

    assert box.stage("b") == "queued"


def test_room_that_a_lease_gives_back_goes_to_who_waits_for_it() -> None:
    box = sharing(60_000)
    box.ask("b", memory_mb=8_000)

    box.release("a")
    box.observe_now(reading())

    assert box.gpus_of("b") == (key(),)


# --- where it cannot be told whose it is ---------------------------------------------------------------------------


def test_without_a_process_list_memory_is_the_leases_up_to_what_they_asked_for() -> None:
    box = sharing(10_000)
    box.observe_now(reading(used_mb=9_000, processes=None))

    assert use_of(box) == MemoryUse({"a": 10_000}, outside_mb=0.0)


def test_without_a_process_list_what_is_more_than_was_asked_for_is_outside() -> None:
    box = sharing(10_000)
    box.observe_now(reading(used_mb=15_000, processes=None))

    assert use_of(box) == MemoryUse({"a": 10_000}, outside_mb=5_000)


def test_without_a_process_list_several_leases_explain_what_all_asked_for() -> None:
    box = sharing(10_000)
    box.ask("b", memory_mb=10_000)
    box.pass_time(1.0)
    box.observe_now(reading(used_mb=25_000, processes=None))

    assert use_of(box) == MemoryUse({"a": 10_000, "b": 10_000}, outside_mb=5_000)


def test_a_process_of_unknown_memory_explains_what_its_lease_asked_for() -> None:
    box = sharing(10_000)
    box.observe_now(reading(used_mb=9_000, processes=(process(7, None),)))

    assert use_of(box) == MemoryUse({"a": 10_000}, outside_mb=0.0)


def test_a_process_of_unknown_memory_explains_only_what_its_others_do_not_hold_already() -> None:
    box = sharing(10_000)
    crowd = (process(7, 8_000), process(8, None, parents=(7,)))
    box.observe_now(reading(used_mb=13_000, processes=crowd))

    assert use_of(box) == MemoryUse({"a": 10_000}, outside_mb=3_000)


def test_an_outsider_of_unknown_memory_explains_nothing_of_a_lease() -> None:
    box = sharing(10_000)
    box.observe_now(reading(used_mb=9_000, processes=(process(66, None),)))

    assert use_of(box) == MemoryUse({"a": 10_000}, outside_mb=9_000)


def test_a_lease_from_another_machine_may_own_what_nobody_accounts_for() -> None:
    box = sharing(10_000, pid=None)
    box.observe_now(reading(used_mb=9_000, processes=(process(66, 9_000),)))

    assert use_of(box) == MemoryUse({"a": 10_000}, outside_mb=0.0)


def test_an_undeclared_lease_is_put_down_what_nobody_else_accounts_for() -> None:
    box = Box(reading())
    box.ask("a")
    box.pass_time(1.0)
    box.observe_now(reading(used_mb=9_000, processes=None))

    assert use_of(box) == MemoryUse({"a": 9_000}, outside_mb=0)


def test_the_memory_of_a_gpu_that_was_not_read_is_unknown() -> None:
    box = sharing()
    box.restart()

    assert memory_use(box.state.slots[key()], frozenset()) is None
    assert used_percent(box.state.slots[key()], frozenset()) is None


# --- processes that do not count -----------------------------------------------------------------------------------


def test_an_ignored_process_leaves_its_memory_to_others() -> None:
    box = sharing(10_000)
    box.observe_now(reading(used_mb=12_000, processes=(process(66, 12_000, name="Xorg"),)))

    box.ignore("Xorg")

    assert use_of(box) == MemoryUse({"a": 10_000}, outside_mb=0.0)


def test_an_ignored_process_does_not_keep_an_exclusive_lease_away() -> None:
    box = Box(reading(used_mb=70_000, processes=(process(66, 70_000, name="Xorg"),)))
    assert box.verdict(memory_threshold_percent=80.0) == verdict(
        "over_memory", memory_percent=87.5, threshold_percent=80.0
    )
    box.ask("a")

    box.ignore("Xorg")

    assert box.stage("a") == "active"


def test_a_process_that_counts_again_keeps_leases_away_again() -> None:
    box = Box(reading(used_mb=70_000, processes=(process(66, 70_000, name="Xorg"),)))
    box.ignore("Xorg")

    box.count("Xorg")

    assert box.verdict(memory_threshold_percent=80.0) == verdict(
        "over_memory", memory_percent=87.5, threshold_percent=80.0
    )


def test_an_ignored_process_does_not_make_a_busy_shared_gpu_somebody_elses() -> None:
    box = sharing(10_000)
    box.ignore("Xorg")
    crowd = (process(7, 9_000), process(66, 200, name="Xorg"))
    box.observe_now(reading(used_mb=9_200, utilization=100, processes=crowd))

    assert box.verdict(memory_mb=1_000).is_eligible


def test_ignoring_twice_is_one_event() -> None:
    box = Box(reading())

    assert configured(box.ignore("Xorg"), "ignored_processes") != []
    assert box.ignore("Xorg") == []


def test_counting_what_was_never_ignored_changes_nothing() -> None:
    assert Box(reading()).count("Xorg") == []


def test_what_is_ignored_outlives_a_restart() -> None:
    box = Box(reading())
    box.ignore("Xorg")

    box.restart()

    assert box.state.ignored_processes == {"Xorg": "an operator"}


def test_ignoring_a_process_changes_nothing_without_a_process_list() -> None:
    box = Box(reading(used_mb=70_000, processes=None))

    box.ignore("Xorg")

    assert box.verdict(memory_threshold_percent=80.0) == verdict(
        "over_memory", memory_percent=87.5, threshold_percent=80.0
    )


# --- statistics only -----------------------------------------------------------------------------------------------


def test_a_reported_percentage_will_do_for_an_exclusive_lease() -> None:
    box = Box(reading(total_mb=None, used_mb=None, processes=None, percent=12.5))

    assert box.verdict() == verdict("eligible", score=12.5)


def test_a_reported_percentage_over_the_threshold_keeps_leases_away() -> None:
    box = Box(reading(total_mb=None, used_mb=None, processes=None, percent=85.0))

    assert box.verdict() == verdict("over_memory", memory_percent=85.0, threshold_percent=80.0)


def test_measured_megabytes_are_believed_before_a_reported_percentage() -> None:
    assert reading(used_mb=8_000, percent=99.0).memory_percent == 10.0


def test_a_percentage_is_not_enough_to_share_by() -> None:
    box = Box(reading(total_mb=None, used_mb=None, processes=None, percent=12.5))

    assert box.verdict(memory_mb=8_000) == verdict("reading_unknown", what="memory size")


def test_ignoring_a_process_does_not_make_a_reported_percentage_unknown() -> None:
    box = Box(reading(used_mb=None, percent=12.5, processes=()))

    box.ignore("Xorg")

    assert box.verdict() == verdict("eligible", score=12.5)


def test_memory_that_was_read_before_the_grant_is_not_the_leases() -> None:
    box = Box(reading(used_mb=24_000, processes=(process(77, 24_000),)))

    box.ask("from elsewhere", memory_mb=40_000)

    assert box.verdict(memory_mb=1).code == "no_room", "24,000 outside and 40,000 leased are the limit of 64,000"
    box.pass_time(1.0)
    box.observe_now(reading(used_mb=64_000, processes=(process(77, 24_000), process(88, 40_000))))
    assert box.verdict(memory_mb=1).code == "no_room"
    box.observe_now(reading(used_mb=40_000, processes=(process(88, 40_000),)))
    assert box.verdict(memory_mb=1).is_eligible, "of what is read later, as much as it asked for may be its own"


def test_after_a_reboot_a_lease_may_own_what_is_read() -> None:
    box = Box(reading())
    box.ask("from elsewhere", memory_mb=40_000)

    box.reboot()
    box.observe_now(reading(used_mb=40_000, processes=(process(88, 40_000),)))

    assert use_of(box) == MemoryUse({"from elsewhere": 40_000}, outside_mb=0.0)
