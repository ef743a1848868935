"""Sharing without double counting: each lease counts as what it asked for or what it uses, whichever is more."""

from __future__ import annotations

from gpu_worker_pool.core.model.slot import MemoryUse, memory_use, used_percent
from gpu_worker_pool.core.queue.verdicts import verdict
from tests.core.build import Box, key, process, reading


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


def test_processes_that_account_for_more_than_is_used_do_not_make_room() -> None:
    box = sharing(10_000)
    box.observe_now(reading(used_mb=5_000, processes=(process(7, 6_000),)))

    assert use_of(box).outside_mb == 0.0


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


def test_ignoring_a_process_changes_nothing_without_a_process_list() -> None:
    box = Box(reading(used_mb=70_000, processes=None))

    box.ignore("Xorg")

    assert box.verdict(memory_threshold_percent=80.0) == verdict(
        "over_memory", memory_percent=87.5, threshold_percent=80.0
    )


# --- statistics only -----------------------------------------------------------------------------------------------


def test_measured_megabytes_are_believed_before_a_reported_percentage() -> None:
    assert reading(used_mb=8_000, percent=99.0).memory_percent == 10.0


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
