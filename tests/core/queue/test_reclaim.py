"""What a process leaves behind on a GPU that it released is free to that process, and to nobody else."""

from __future__ import annotations

from gpu_worker_pool.core.model import commands as cmd
from tests.core.build import Box, key, process, reading

# What a process leaves behind


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
