"""Short scenes on a small pool, for the rules that random histories meet too seldom to rely on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.core.harness import CheckedPool, Core


class Scene:
    """A small pool, for the rules that random histories seldom touch. Processes run on its first GPU."""

    def __init__(
        self, core: Core, gpus: int = 1, used_mb: float = 0.0, utilization: float = 0.0, **settings: Any
    ) -> None:
        self.core = core
        self.keys = [core.gpu.GpuKey("box", f"GPU-a{index}") for index in range(gpus)]
        self.pool = CheckedPool(core, **settings)
        self.pool.take_over(0.0)
        self.see(1.0, used_mb=used_mb, utilization=utilization)

    def see(
        self,
        at: float,
        *processes: Any,
        used_mb: float = 0.0,
        utilization: float | None = 0.0,
        now: float | None = None,
    ) -> None:
        gpu = self.core.gpu
        readings = []
        for index, key in enumerate(self.keys):
            running = processes if index == 0 else ()
            used = used_mb + sum(process.memory_mb for process in running)
            device = gpu.Gpu(key, index, "NVIDIA A100")
            readings.append(gpu.Reading(device, at, 80_000.0, used, utilization, processes=running))
        self.pool.do(self.core.commands.Observe(tuple(readings)), at if now is None else now)

    def process(self, pid: int, *ancestors: int, memory_mb: float = 16_000.0) -> Any:
        gpu = self.core.gpu
        links = tuple(gpu.ProcessId(ancestor, 1.0) for ancestor in ancestors)
        return gpu.GpuProcess(gpu.ProcessId(pid, 1.0), memory_mb, "train", links)

    def ask(self, pid: int, now: float, *, again: int = 0, node: str | None = None, **wishes: Any) -> None:
        request = self.core.request
        holder = request.Holder(process=self.core.gpu.ProcessId(pid, 1.0), node=node)
        asked = request.Request(request.Wishes(**wishes), holder)
        self.pool.do(self.core.commands.RequestLease(f"lease{pid}{'again' * again}", asked), now)

    def renew(self, pid: int, now: float) -> None:
        self.pool.do(self.core.commands.Renew((f"lease{pid}",)), now)

    def release(self, pid: int, now: float) -> None:
        self.pool.do(self.core.commands.Release(f"lease{pid}", is_holder=True), now)


def ask_for_what_is_out_of_service(core: Core) -> None:
    scene = Scene(core)
    scene.pool.do(core.commands.Configure("excluded", tuple(scene.keys[0]), "repair"), 2.0)
    scene.ask(1, 3.0)
    scene.ask(2, 4.0, gpus=1, memory_mb=8_000.0)


def share_with_one_that_uses_more_than_it_asked_for(core: Core) -> None:
    scene = Scene(core)
    scene.ask(1, 2.0, memory_mb=8_000.0)
    scene.see(3.0, scene.process(1))
    scene.ask(2, 4.0, memory_mb=40_000.0)


def ask_at_the_memory_threshold(core: Core) -> None:
    Scene(core, used_mb=64_000.0).ask(1, 2.0)


def ask_at_the_utilization_threshold(core: Core) -> None:
    Scene(core, utilization=90.0).ask(1, 2.0)


def release_while_the_process_stays(core: Core) -> None:
    scene = Scene(core)
    scene.ask(1, 2.0)
    scene.see(3.0, scene.process(1))
    scene.release(1, 4.0)
    scene.see(5.0, scene.process(1))


def release_while_a_reading_is_under_way(core: Core) -> None:
    scene = Scene(core)
    scene.ask(1, 2.0)
    scene.release(1, 4.0)
    scene.see(3.9, now=4.1)


def release_while_an_orphan_stays(core: Core) -> None:
    scene = Scene(core)
    scene.ask(1, 2.0)
    scene.see(3.0, scene.process(2, 1))
    scene.release(1, 4.0)
    scene.see(5.0, scene.process(2))


def die_with_a_context_left(core: Core) -> None:
    scene = Scene(core)
    scene.ask(1, 2.0)
    scene.see(3.0, scene.process(1, memory_mb=500.0))
    scene.pool.do(core.commands.EndLease("lease1", core.commands.EndReason("holder_died")), 4.0)
    scene.see(5.0, scene.process(1, memory_mb=500.0))


def another_asks_for_what_a_process_has_left(core: Core) -> None:
    scene = Scene(core)
    scene.ask(1, 2.0)
    scene.see(3.0, scene.process(1))
    scene.release(1, 4.0)
    scene.see(5.0, scene.process(1))
    scene.ask(2, 6.0)
    scene.ask(1, 7.0, again=True)


def a_process_of_another_node_asks_for_what_one_has_left(core: Core) -> None:
    scene = Scene(core)
    scene.ask(1, 2.0)
    scene.see(3.0, scene.process(1))
    scene.release(1, 4.0)
    scene.see(5.0, scene.process(1))
    scene.ask(1, 6.0, again=1, node="another")


def ask_where_the_load_is_unknown(core: Core) -> None:
    scene = Scene(core)
    scene.see(2.0, utilization=None)
    scene.ask(1, 3.0)


def the_same_asks_for_what_it_has_left(core: Core) -> None:
    scene = Scene(core)
    scene.ask(1, 2.0)
    scene.see(3.0, scene.process(1))
    scene.release(1, 4.0)
    scene.see(5.0, scene.process(1))
    scene.ask(1, 6.0, again=True)


def ask_again_where_the_load_is_unknown(core: Core) -> None:
    """The soak found this one: with no other process on the GPU, its load is that of the process that asks."""
    scene = Scene(core)
    scene.ask(1, 2.0)
    scene.see(3.0, scene.process(1))
    scene.release(1, 4.0)
    scene.see(5.0, scene.process(1), utilization=None)
    scene.ask(1, 6.0, again=True)
    assert scene.pool.state.active("lease1again")


def ask_for_what_was_given_back_and_taken_away(core: Core) -> None:
    scene = Scene(core)
    for again in (0, 1):
        scene.ask(1, 2.0, again=again, memory_mb=8_000.0)
    scene.see(3.0, scene.process(1))
    scene.release(1, 4.0)
    scene.pool.do(core.commands.EndLease("lease1again", core.commands.EndReason("revoked")), 5.0)
    scene.ask(1, 6.0, again=2, memory_mb=8_000.0)


def two_leave_something_and_one_asks_again(core: Core) -> None:
    scene = Scene(core)
    for pid in (1, 2):
        scene.ask(pid, 2.0, memory_mb=8_000.0)
    scene.see(3.0, scene.process(1), scene.process(2))
    for pid in (1, 2):
        scene.release(pid, 4.0)
    scene.see(5.0, scene.process(1), scene.process(2))
    scene.ask(1, 6.0, again=True, memory_mb=8_000.0)


def ask_for_two_of_three(core: Core) -> None:
    Scene(core, gpus=3).ask(1, 2.0, gpus=2, among=("1", "2"))


def ask_for_how_two_uuids_begin(core: Core) -> None:
    scene = Scene(core, gpus=3)
    scene.ask(1, 2.0, among=("1",))
    scene.ask(2, 3.0, among=("1", "GPU-a"))


def ask_for_one_whose_uuid_begins_another(core: Core) -> None:
    scene = Scene(core, gpus=11)
    scene.ask(1, 2.0, among=("0",))
    scene.ask(2, 3.0, among=("0", "GPU-a1"))


def ask_for_two_of_one(core: Core) -> None:
    scene = Scene(core, gpus=2)
    scene.ask(1, 2.0, gpus=2, among=("0",))
    assert not scene.pool.state.leases


def ask_for_two_where_all_but_one_are_held(core: Core) -> None:
    scene = Scene(core, gpus=4)
    scene.ask(1, 2.0, among=("0",))
    scene.ask(2, 3.0, gpus=3, among=("0", "1", "2"))
    scene.ask(3, 4.0, gpus=2)


def ask_long_after_the_last_look(core: Core) -> None:
    Scene(core).ask(1, 20.0)


def take_over_while_a_reading_is_under_way(core: Core) -> None:
    scene = Scene(core)
    scene.pool.take_over(3.0)
    scene.see(2.0, now=4.0)
    scene.ask(1, 4.0)


def ask_when_the_clock_was_set_back(core: Core) -> None:
    scene = Scene(core)
    scene.ask(1, 5.0)
    scene.ask(2, 3.0)


def wait_for_one_behind_one_that_can_have_none(core: Core) -> None:
    scene = Scene(core, gpus=2, reserve_after_s=0.0)
    scene.ask(1, 2.0, gpus=2)
    scene.ask(2, 3.0, gpus=2)
    scene.ask(3, 4.0)
    scene.pool.do(core.commands.Configure("excluded", tuple(scene.keys[1]), "repair"), 5.0)
    scene.release(1, 6.0)
    scene.see(7.0)


def wait_for_a_small_share_behind_a_large_one(core: Core) -> None:
    scene = Scene(core, gpus=2, reserve_after_s=0.0)
    for number in (1, 2):
        scene.ask(number, 2.0, memory_mb=40_000.0)
    for number in (3, 4):
        scene.ask(number, 3.0, memory_mb=20_000.0)  # one beside each
    scene.ask(5, 5.0, memory_mb=50_000.0)
    scene.ask(6, 6.0, memory_mb=20_000.0)
    # How long it lasted says nothing, so no date can be told, and nothing is reserved.
    scene.pool.do(core.commands.EndLease("lease3", core.commands.EndReason("revoked")), 7.0)
    scene.see(8.0)


def wait_for_one_behind_one_that_waits_for_another(core: Core) -> None:
    scene = Scene(core, gpus=2)
    scene.ask(1, 2.0, among=("0",))
    scene.ask(2, 3.0, among=("1",))
    scene.ask(3, 4.0, among=("0",))
    scene.ask(4, 5.0)
    scene.release(2, 6.0)
    scene.see(7.0)


def be_released_by_another_with_a_context_left(core: Core) -> None:
    scene = Scene(core)
    scene.ask(1, 2.0)
    context = scene.process(1, memory_mb=300.0)
    scene.see(3.0, context)
    scene.pool.do(core.commands.Release("lease1", by="bob"), 4.0)
    scene.see(5.0, context)


def hold_for_longer_than_the_ttl(core: Core) -> None:
    scene = Scene(core)
    scene.ask(1, 2.0)
    scene.see(1000.0)


def ask_for_what_an_outsider_uses(core: Core) -> None:
    scene = Scene(core)
    scene.see(2.0, scene.process(77))
    scene.ask(1, 3.0)
    scene.ask(2, 4.0, memory_threshold_percent=50.0)


def ask_for_two_of_which_an_outsider_uses_one(core: Core) -> None:
    scene = Scene(core, gpus=2)
    scene.see(2.0, scene.process(77))
    scene.ask(1, 3.0, gpus=2, memory_threshold_percent=50.0)


def ask_for_what_the_own_process_uses(core: Core) -> None:
    scene = Scene(core)
    scene.see(2.0, scene.process(1))
    scene.ask(1, 3.0)


def wait_and_never_call(core: Core) -> None:
    scene = Scene(core, take_up_s=5.0)
    for pid in (1, 2, 3):
        scene.ask(pid, 1.0 + pid)
    scene.release(1, 4.5)
    scene.see(5.0)
    scene.pool.do(core.commands.Tick(), 12.0)
    scene.see(13.0)
    scene.renew(3, 14.0)
    scene.release(3, 15.0)
    scene.see(16.0)
    scene.renew(2, 17.0)


def ask_where_one_is_free(core: Core) -> None:
    Scene(core, take_up_s=5.0).ask(1, 2.0)


def wait_through_a_restart(core: Core) -> None:
    scene = Scene(core, take_up_s=5.0)
    scene.ask(1, 2.0)
    scene.ask(2, 3.0)
    scene.pool.take_over(4.0)
    scene.release(1, 5.0)
    scene.see(6.0)


SCENES: dict[str, Callable[[Core], None]] = {
    "a waiter that did not call is passed over": wait_and_never_call,
    "a waiter that did not call keeps its place": wait_and_never_call,
    "the answer to a request need not be taken up": ask_where_one_is_free,
    "a waiter that has not called since the take-over has less time": wait_through_a_restart,
    "a GPU in use outside the pool is not granted": ask_for_what_an_outsider_uses,
    "thresholds of a request decide about processes outside the pool": ask_for_two_of_which_an_outsider_uses_one,
    "a process may have the GPU that it alone uses outside the pool": ask_for_what_the_own_process_uses,
    "that several GPUs cannot be had says nothing about one": wait_for_one_behind_one_that_can_have_none,
    "a waiter for less memory is not kept waiting by one that asks for more in vain": wait_for_a_small_share_behind_a_large_one,
    "that some GPUs cannot be had says nothing about others": wait_for_one_behind_one_that_waits_for_another,
    "a lease is not counted twice": share_with_one_that_uses_more_than_it_asked_for,
    "at the memory threshold is not available": ask_at_the_memory_threshold,
    "at the utilization threshold is not available": ask_at_the_utilization_threshold,
    "a GPU is not free before its lease's processes are gone": release_while_the_process_stays,
    "a reading from before the end tells nothing": release_while_a_reading_is_under_way,
    "an orphan still belongs to its lease": release_while_an_orphan_stays,
    "several GPUs are on one node, all or nothing": ask_for_two_where_all_but_one_are_held,
    "a stale reading is not granted": ask_long_after_the_last_look,
    "a reading from before the take-over is void": take_over_while_a_reading_is_under_way,
    "what can never be among the GPUs asked for is refused": ask_for_two_of_one,
    "only the GPUs that were asked for are granted": ask_for_two_of_three,
    "how several UUIDs begin names none of them": ask_for_how_two_uuids_begin,
    "a whole UUID names its GPU, however many others begin with it": ask_for_one_whose_uuid_begins_another,
    "time does not go back": ask_when_the_clock_was_set_back,
    "a GPU out of service is not granted": ask_for_what_is_out_of_service,
    "only a holder that released its GPU may leave a context there": die_with_a_context_left,
    "what another caller released drains until its processes are gone": be_released_by_another_with_a_context_left,
    "a lease of a process that is watched does not run out": hold_for_longer_than_the_ttl,
    "more than a context is something left": release_while_the_process_stays,
    "what a process has left does not keep that process out": the_same_asks_for_what_it_has_left,
    "what a process has left does not keep that process out, even if its load is unknown": ask_again_where_the_load_is_unknown,
    "what a process has left is for no process of another node": a_process_of_another_node_asks_for_what_one_has_left,
    "unknown is not zero": ask_where_the_load_is_unknown,
    "what was taken away is not had back before it is free": ask_for_what_was_given_back_and_taken_away,
    "only what the own process has left does not count": two_leave_something_and_one_asks_again,
    "what a process has left is no way past a waiter ahead": another_asks_for_what_a_process_has_left,
}
