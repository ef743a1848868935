"""What a process leaves behind on a GPU that it released is free to that process, and to nobody else."""

from __future__ import annotations

from gpu_worker_pool.core.model import commands as cmd
from tests.core.build import Box, key, process, reading

# What a process leaves behind


def test_who_gives_a_gpu_back_and_lives_on_may_keep_a_context_there() -> None:
    box = Box(reading())
    box.ask("a", pid=1)
    box.ask("b", pid=2)
    box.observe_now(reading(used_mb=20_000, processes=(process(1, 20_000),)))
    box.release("a")
    box.pass_time(0.1)
    box.observe_now(reading(used_mb=500, processes=(process(1, 500),)))
    assert box.gpus_of("b") == (key(),)


def test_more_than_a_context_keeps_the_gpu_from_others() -> None:
    box = Box(reading())
    box.ask("a", pid=1)
    box.ask("b", pid=2)
    box.observe_now(reading(used_mb=20_000, processes=(process(1, 20_000),)))
    box.release("a")
    box.pass_time(0.1)
    box.observe_now(reading(used_mb=20_000, processes=(process(1, 20_000),)))
    assert box.stage("b") == "queued"
    assert "pid 1 still holds 19.5 GiB" in str(box.explain("b"))


def test_workers_of_one_program_hand_a_gpu_on_though_the_program_keeps_its_memory() -> None:
    box = Box(reading())
    box.ask("first", pid=1)
    box.observe_now(reading(used_mb=70_000, utilization=99, processes=(process(1, 70_000),)))
    box.ask("second", pid=1)
    box.release("first")
    assert box.gpus_of("second") == (key(),)
    box.pass_time(0.1)
    box.observe_now(reading(used_mb=70_000, utilization=99, processes=(process(1, 70_000),)))
    assert box.stage("first") == "released"
    assert box.stage("second") == "active"


def test_a_program_that_asks_again_gets_the_gpu_it_keeps_warm() -> None:
    box = Box(reading())
    box.ask("first", pid=1)
    box.observe_now(reading(used_mb=70_000, processes=(process(1, 70_000),)))
    box.release("first")
    box.pass_time(0.1)
    box.observe_now(reading(used_mb=70_000, processes=(process(1, 70_000),)))
    assert box.stage("first") == "draining"
    box.ask("second", pid=1)
    assert box.gpus_of("second") == (key(),)


def test_a_program_that_keeps_a_gpu_warm_does_not_overtake_somebody_ahead() -> None:
    box = Box(reading())
    box.ask("first", pid=1)
    box.observe_now(reading(used_mb=70_000, processes=(process(1, 70_000),)))
    box.ask("other", pid=2)
    box.ask("second", pid=1)
    box.release("first")
    assert box.stage("other") == "queued"
    assert box.stage("second") == "queued"
    box.pass_time(0.1)
    box.observe_now(reading(used_mb=0))
    assert box.gpus_of("other") == (key(),)


def test_memory_of_others_on_a_warm_gpu_still_counts() -> None:
    box = Box(reading())
    box.ask("first", pid=1)
    full = reading(used_mb=75_000, processes=(process(1, 10_000), process(9, 65_000)))
    box.observe_now(full)
    box.release("first")
    box.pass_time(0.1)
    box.observe_now(full)
    box.ask("second", pid=1)
    assert box.stage("second") == "queued"


def test_of_two_leases_of_a_program_on_one_gpu_the_second_to_drain_is_still_its_own() -> None:
    box = Box(reading())
    for name in ("a", "b"):
        box.ask(name, pid=1, memory_mb=8_000)
    box.observe_now(reading(used_mb=16_000, processes=(process(1, 16_000),)))
    box.release("a")
    box.pass_time(1)
    box.release("b")
    box.pass_time(59.5)
    assert (box.stage("a"), box.stage("b")) == ("released", "draining")
    box.observe_now(reading(used_mb=16_000, processes=(process(1, 16_000),)))
    box.ask("c", pid=1)
    assert box.gpus_of("c") == (key(),)


def test_what_somebody_else_left_is_not_had_by_claiming_his_pid() -> None:
    box = Box(reading())
    box.ask("first", pid=1, owner="ada")
    box.observe_now(reading(used_mb=70_000, processes=(process(1, 70_000),)))
    box.release("first")
    box.pass_time(0.1)
    box.observe_now(reading(used_mb=70_000, processes=(process(1, 70_000),)))
    box.ask("second", pid=1, owner="eve")
    assert box.stage("second") == "queued"


def test_a_program_that_asks_and_releases_again_and_again_leaves_no_pile_of_draining_leases() -> None:
    box = Box(reading())
    box.ask("0", pid=1)
    box.observe_now(reading(used_mb=70_000, processes=(process(1, 69_000), process(2, 1_000, parents=(1,)))))
    for number in range(1000):
        box.release(str(number))
        box.ask(str(number + 1), pid=1)
    assert list(box.state.slots[key()].occupants) == ["1000"]
    assert {box.stage(str(number)) for number in range(1000)} == {"released"}

    # What the earlier leases left there is the last one's, also a process whose parent is gone.
    box.revoke("1000")
    box.pass_time(0.1)
    box.observe_now(reading(used_mb=1_000, processes=(process(2, 1_000),)))
    assert box.stage("1000") == "draining"
    box.observe_now(reading())
    assert box.stage("1000") == "revoked"


def test_a_program_whose_leases_an_administrator_ends_leaves_one_draining_lease() -> None:
    box = Box(reading())
    box.ask("0", pid=1)
    box.observe_now(reading(used_mb=70_000, processes=(process(1, 70_000),)))
    for number in range(1000):
        box.do(cmd.Release(str(number), by="root"))
        box.ask(str(number + 1), pid=1)
    assert list(box.state.slots[key()].occupants) == ["0"]
    assert box.stage("1000") == "queued"
    assert "draining: pid 1 still holds" in str(box.explain("1000"))
