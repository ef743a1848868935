"""Whose each process on a GPU is, said as the reckoning of its memory goes."""

from __future__ import annotations

from gpu_worker_pool.core.model.slot import ProcessOwnership, attribute_processes, memory_use
from tests.core.build import Box, key, process, reading


def places(box: Box) -> dict[int, ProcessOwnership]:
    found = attribute_processes(box.state.slots[key()], box.state.ignored_processes)
    return {process.id.pid: place for process, place in found}


def outside_mb(box: Box) -> float:
    use = memory_use(box.state.slots[key()], box.state.ignored_processes)
    assert use is not None
    return use.outside_mb


def test_a_process_is_the_leases_whose_holder_it_is_or_descends_from_and_all_others_are_outside() -> None:
    box = Box(reading())
    box.ask("a", memory_mb=10_000, pid=7)
    box.ask("b", memory_mb=10_000, pid=8)
    box.observe_now(
        reading(
            used_mb=400, processes=(process(7, 100), process(71, 100, parents=(7,)), process(8, 100), process(9, 100))
        )
    )

    assert places(box) == {
        7: ProcessOwnership(("a",), is_outside=False, is_ignored=False),
        71: ProcessOwnership(("a",), is_outside=False, is_ignored=False),
        8: ProcessOwnership(("b",), is_outside=False, is_ignored=False),
        9: ProcessOwnership((), is_outside=True, is_ignored=False),
    }
    assert outside_mb(box) == 100


def test_two_leases_of_one_process_both_own_it() -> None:
    box = Box(reading())
    box.ask("a", memory_mb=10_000, pid=7)
    box.ask("b", memory_mb=10_000, pid=7)
    box.observe_now(reading(used_mb=100, processes=(process(7, 100),)))

    assert places(box)[7].lease_ids == ("a", "b")


def test_where_the_processes_of_a_lease_are_not_known_it_cannot_be_told_whose_the_others_are() -> None:
    box = Box(reading())
    box.ask("local", memory_mb=10_000, pid=7)
    box.ask("remote", memory_mb=10_000)
    box.pass_time(1.0)
    box.observe_now(reading(used_mb=200, processes=(process(7, 100), process(9, 100))))

    assert places(box)[7].is_outside is False
    assert places(box)[9] == ProcessOwnership((), is_outside=None, is_ignored=False)
    assert outside_mb(box) == 0, "it is put down to the one who may own it"


def test_a_process_that_does_not_count_says_so_and_is_nobodys() -> None:
    box = Box(reading())
    box.ask("remote", memory_mb=10_000)
    box.ignore("Xorg")
    box.observe_now(reading(used_mb=100, processes=(process(9, 100, name="Xorg"),)))

    assert places(box)[9] == ProcessOwnership((), is_outside=True, is_ignored=True)


def test_a_gpu_that_does_not_tell_its_processes_has_none_to_place() -> None:
    assert places(Box(reading(processes=None))) == {}
