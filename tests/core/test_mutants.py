"""Each rule is removed in turn, and the property tests must notice: a check that cannot fail is no check.

A mutant is a copy of the core with one piece of text replaced, imported under a name of its own.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import gpu_worker_pool.core

from .harness import REAL, CheckedPool, Core
from .pool_machine import PoolMachine

CORE = Path(gpu_worker_pool.core.__file__).parent


@dataclass(frozen=True)
class Mutant:
    """A rule, and the core without it."""

    rule: str
    module: str
    text: str
    instead: str
    also: tuple[str, str, str] | None = None

    @property
    def changes(self) -> list[tuple[str, str, str]]:
        return [(self.module, self.text, self.instead), *([self.also] if self.also else [])]


MUTANTS = (
    Mutant(
        "an exclusive GPU has one lease",
        "slot",
        "return not self.is_shared and len(self.occupants) < workers_per_gpu",
        "return not self.is_shared",
    ),
    Mutant(
        "who shares does not share with who did not say how much he needs",
        "slot",
        "            return self.is_shared\n",
        "            return True\n",
    ),
    Mutant(
        "committed memory stays below the limit",
        "eligibility",
        "if use.committed_mb + wishes.memory_mb > limit_mb:",
        "if use.outside_mb + wishes.memory_mb > limit_mb:",
    ),
    Mutant(
        "a lease is not counted twice",
        "slot",
        "asked_mb, observed_mb)\n            unexplained_mb -= process.memory_mb\n",
        "asked_mb, observed_mb)\n",
    ),
    Mutant(
        "outside memory counts",
        "slot",
        "return MemoryUse(by_lease, max(unexplained_mb, 0.0))",
        "return MemoryUse(by_lease, 0.0)",
    ),
    Mutant(
        "at the memory threshold is not available",
        "eligibility",
        "if percent >= thresholds.memory_percent:",
        "if percent > thresholds.memory_percent:",
        # The index keeps to it as well.
        also=(
            "capacity",
            "found.percent < limits.memory_percent",
            "found.percent <= limits.memory_percent",
        ),
    ),
    Mutant(
        "at the utilization threshold is not available",
        "eligibility",
        "if utilization >= thresholds.utilization_percent and not (",
        "if utilization > thresholds.utilization_percent and not (",
        also=(
            "capacity",
            "and found.load_percent < limits.utilization_percent",
            "and found.load_percent <= limits.utilization_percent",
        ),
    ),
    Mutant(
        "unknown is not zero",
        "evolve",
        "        slot.reading = reading\n",
        "        slot.reading = replace(reading, utilization_percent=reading.utilization_percent or 0.0)\n",
    ),
    Mutant("a stale reading is not granted", "eligibility", "if now > stale_at(state, reading):", "if False:"),
    Mutant(
        "a GPU with a fault is not granted",
        "capacity",
        "is_measured = reading.fault is None and load_percent is not None",
        "is_measured = load_percent is not None",
        # The index and the judge both keep to it.
        also=("eligibility", "if reading.fault is not None:", "if False:"),
    ),
    Mutant(
        "a GPU out of service is not granted",
        "capacity",
        "if not is_measured or load_percent is None or slot.key in excluded:",
        "if not is_measured or load_percent is None:",
        # The index and the judge both keep to it.
        also=("eligibility", "if excluded_because is not None:", "if False:"),
    ),
    Mutant("higher priority goes first", "lease", "(-self.request.priority, self.seq)", "(0, self.seq)"),
    Mutant(
        "first come, first served",
        "lease",
        "(-self.request.priority, self.seq)",
        "(-self.request.priority, -self.seq)",
    ),
    Mutant(
        "a wide request holds what it could use",
        "assignment",
        "            kept = _free(survey, wishes, gone)\n",
        "            kept: list[GpuKey] = []\n",
    ),
    Mutant(
        "nobody takes what somebody ahead holds",
        "assignment",
        "gpus = survey.place(wishes, gone.keys())",
        "gpus = survey.place(wishes)",
    ),
    Mutant(
        "who is kept waiting by those who share is not kept out forever",
        "assignment",
        "if may_reserve:",
        "if False:",
    ),
    Mutant(
        "that several GPUs cannot be had says nothing about one",
        "assignment",
        "        if wishes.gpus == 1:\n            kind = ",
        "        if True:\n            kind = ",
    ),
    Mutant(
        "who wants less memory is not kept waiting by who wants more in vain",
        "assignment",
        "return (wishes.memory_mb or 0.0) >= least_mb",
        "return least_mb < inf",
    ),
    Mutant(
        "that some GPUs cannot be had says nothing about others",
        "assignment",
        "            kind = (*_terms(wishes), wishes.model, wishes.among)\n",
        "            kind = (*_terms(wishes), None, None)\n",
    ),
    Mutant(
        "several GPUs are on one node, all or nothing",
        "placement",
        "if len(usable) >= wishes.gpus:",
        "if usable:",
    ),
    Mutant(
        "a share breaks no whole GPU while it fits beside others",
        "capacity",
        "for use in (Use.SHARED, Use.WHOLE):",
        "for use in (Use.WHOLE, Use.SHARED):",
    ),
    Mutant("a lease runs out", "decide", "for lease_id in state.agenda.due(now):", "for lease_id in ():"),
    Mutant(
        "renewing gives a full TTL",
        "evolve",
        "state.agenda.set(lease_id, event.at + state.leases[lease_id].request.ttl_s)",
        "pass",
    ),
    Mutant(
        "fences grow",
        "decide",
        "fences[node] = fences.get(node, state.fences.get(node, 0)) + 1",
        "fences[node] = 1",
    ),
    Mutant(
        "a GPU is not free before its lease's processes are gone",
        "decide",
        "    if not left:\n",
        "    if True:\n",
    ),
    Mutant(
        "only who gave a GPU back may leave a context there",
        "decide",
        "    if lease.ended.reason is not EndReason.RELEASED or reading.processes is None:\n",
        "    if reading.processes is None:\n",
    ),
    Mutant(
        "more than a context is something left",
        "decide",
        "mb is not None and mb <= context_mb",
        "mb is not None",
    ),
    Mutant(
        "what a process has left keeps nobody of that process out",
        "assignment",
        "if not outcome.grants and state.leftovers and",
        "if not outcome.grants and not state.leftovers and",
    ),
    Mutant(
        "what a process has left is no way past somebody ahead",
        "leftovers",
        "line[0] < place and is_suitable",
        "line[0] == place and is_suitable",
    ),
    Mutant(
        "only what the own process has left does not count",
        "leftovers",
        "lease_id not in given_back",
        "not slot.occupants[lease_id].is_draining",
    ),
    Mutant(
        "what was taken away is not had back before it is free",
        "leftovers",
        "lease_id not in given_back",
        "slot.occupants[lease_id].process != process",
    ),
    Mutant(
        "a reading from before the end tells nothing",
        "decide",
        "                and reading.at >= lease.since\n",
        "",
    ),
    Mutant(
        "an orphan still belongs to its lease",
        "slot",
        "roots[lease_id] = list(self.members.get(lease_id, ()))",
        "roots[lease_id] = []",
    ),
    Mutant(
        "what can never be served is refused",
        "decide",
        "if why := _why_never(state, request):",
        "if why := None:",
    ),
    Mutant(
        "only the GPUs that were asked for are granted",
        "eligibility",
        "slot.key not in state.capacity.named(wishes.among)",
        "False",
        # The index keeps to it as well.
        also=(
            "capacity",
            "if use_of_entry is use and (entry[-1] == node or entry[-1] in named):",
            "if use_of_entry is use:",
        ),
    ),
    Mutant(
        "how several UUIDs begin names none of them",
        "gpu_names",
        "if not others or (uuid == start and others[0][0] != start):",
        "if True:",
    ),
    Mutant(
        "a whole UUID names its GPU, however many others begin with it",
        "gpu_names",
        "if not others or (uuid == start and others[0][0] != start):",
        "if not others:",
    ),
    Mutant(
        "nothing is held where there are not enough of the GPUs asked for",
        "capacity",
        "_has_enough(self._named_on(node, wishes.among, in_service=True), wishes, thresholds)",
        "True",
    ),
    Mutant(
        "what can never be among the GPUs asked for is refused",
        "capacity",
        "_has_enough(self._named_on(node, wishes.among, in_service=False), wishes, thresholds)",
        "True",
    ),
    Mutant(
        "the queue is looked at again when GPUs have other indices",
        "capacity",
        "or is_renamed or",
        "or",
    ),
    Mutant("time does not go back", "decide", "max(now, state.clock))", "now)"),
    Mutant(
        "the queue is looked at again when somebody who held GPUs leaves",
        "evolve",
        "if lease.id in state.holds.values() or state.newcomers:",
        "if False:",
    ),
    Mutant(
        "what is decided depends on the events alone",
        "decide",
        "    found = serve_queue(state, now)\n",
        "    found = serve_queue(state, now)\n    state.next_seq += 1\n",
    ),
    Mutant(
        "after a reboot no local process is alive",
        "decide",
        "elif lease.request.holder.is_local:",
        "elif False:",
    ),
    Mutant(
        "after a restart every lease has a full TTL again",
        "evolve",
        "        state.agenda.set(lease.id, event.at + limit_s)\n",
        "        pass\n",
    ),
)


@pytest.fixture
def mutant_core(mutant: Mutant, tmp_path: Path) -> Iterator[Core]:
    name = f"mutant_{MUTANTS.index(mutant)}"
    package = tmp_path / name
    shutil.copytree(CORE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for module_name, text, instead in mutant.changes:
        file = package / f"{module_name}.py"
        source = file.read_text(encoding="utf-8")
        assert source.count(text) == 1, "the text to replace must stand in the module just once"
        file.write_text(source.replace(text, instead), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(
        name, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield Core(name)
    for loaded in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
        del sys.modules[loaded]


class Scene:
    """A small pool, for the rules that random histories seldom touch. Processes run on its first GPU."""

    def __init__(self, core: Core, gpus: int = 1, used_mb: float = 0.0, utilization: float = 0.0) -> None:
        self.core = core
        self.keys = [core.gpu.GpuKey("box", f"GPU-a{index}") for index in range(gpus)]
        self.pool = CheckedPool(core)
        self.pool.do(core.commands.Open("boot"), 0.0)
        self.see(1.0, used_mb=used_mb, utilization=utilization)

    def see(
        self, at: float, *processes: Any, used_mb: float = 0.0, utilization: float = 0.0, now: float | None = None
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

    def ask(self, pid: int, now: float, *, again: int = 0, **wishes: Any) -> None:
        request = self.core.request
        holder = request.Holder(process=self.core.gpu.ProcessId(pid, 1.0))
        asked = request.Request(request.Wishes(**wishes), holder)
        self.pool.do(self.core.commands.RequestLease(f"lease{pid}{'again' * again}", asked), now)

    def release(self, pid: int, now: float) -> None:
        self.pool.do(self.core.commands.Release(f"lease{pid}"), now)


def leave_the_queue_with_a_gpu_held(core: Core) -> None:
    scene = Scene(core, gpus=2)
    scene.ask(1, 2.0)
    scene.ask(2, 3.0, gpus=2)
    scene.ask(3, 4.0)
    scene.release(2, 5.0)


def ask_for_what_is_out_of_service(core: Core) -> None:
    scene = Scene(core)
    scene.pool.do(core.commands.ExcludeGpu(scene.keys[0], "repair"), 2.0)
    scene.ask(1, 3.0)
    scene.ask(2, 4.0, gpus=1, memory_mb=8_000.0)


def share_with_one_who_uses_more_than_he_asked_for(core: Core) -> None:
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
    scene.pool.do(core.commands.ReportDeath("lease1"), 4.0)
    scene.see(5.0, scene.process(1, memory_mb=500.0))


def another_asks_for_what_a_process_has_left(core: Core) -> None:
    scene = Scene(core)
    scene.ask(1, 2.0)
    scene.see(3.0, scene.process(1))
    scene.release(1, 4.0)
    scene.see(5.0, scene.process(1))
    scene.ask(2, 6.0)
    scene.ask(1, 7.0, again=True)


def the_same_asks_for_what_he_has_left(core: Core) -> None:
    scene = Scene(core)
    scene.ask(1, 2.0)
    scene.see(3.0, scene.process(1))
    scene.release(1, 4.0)
    scene.see(5.0, scene.process(1))
    scene.ask(1, 6.0, again=True)


def ask_for_what_was_given_back_and_then_taken_away(core: Core) -> None:
    scene = Scene(core)
    scene.ask(1, 2.0)
    scene.see(3.0, scene.process(1))
    scene.release(1, 4.0)
    scene.see(5.0, scene.process(1))
    scene.ask(1, 6.0, again=1)
    scene.pool.do(core.commands.Revoke("lease1again"), 7.0)
    scene.ask(1, 8.0, again=2)


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


def take_one_of_two_out_of_service(core: Core) -> None:
    scene = Scene(core, gpus=3)
    scene.pool.do(core.commands.ExcludeGpu(scene.keys[1], "repair"), 2.0)
    scene.ask(1, 3.0, gpus=2, among=("0", "1"))
    scene.ask(2, 4.0, among=("0",))


def renumber_a_gpu_that_is_taken(core: Core) -> None:
    scene = Scene(core, gpus=2)
    scene.ask(1, 2.0, among=("1",))
    scene.ask(2, 3.0, gpus=2, among=("0", "1"))  # holds 0, until nobody goes by 1 any more
    gpu = core.gpu
    reading = gpu.Reading(gpu.Gpu(scene.keys[1], 5, "NVIDIA A100"), 4.0, 80_000.0, 0.0, 0.0, processes=())
    scene.pool.do(core.commands.Observe((reading,)), 4.0)
    scene.ask(3, 5.0, among=("GPU-a0",))


def ask_for_two_of_one(core: Core) -> None:
    scene = Scene(core, gpus=2)
    scene.ask(1, 2.0, gpus=2, among=("0",))
    assert not scene.pool.state.leases


def look_again_with_a_gpu_held(core: Core) -> None:
    scene = Scene(core, gpus=2)
    scene.ask(1, 2.0)
    scene.ask(2, 3.0, gpus=2)
    scene.see(4.0, used_mb=100.0)


def ask_for_two_where_all_but_one_are_held(core: Core) -> None:
    scene = Scene(core, gpus=4)
    scene.ask(1, 2.0, among=("0",))
    scene.ask(2, 3.0, gpus=3, among=("0", "1", "2"))
    scene.ask(3, 4.0, gpus=2)


def ask_long_after_the_last_look(core: Core) -> None:
    Scene(core).ask(1, 20.0)


def ask_when_the_clock_was_set_back(core: Core) -> None:
    scene = Scene(core)
    scene.ask(1, 5.0)
    scene.ask(2, 3.0)


def wait_for_one_behind_who_can_have_none(core: Core) -> None:
    scene = Scene(core, gpus=2)
    scene.ask(1, 2.0, gpus=2)
    scene.ask(2, 3.0, gpus=2)
    scene.ask(3, 4.0)
    scene.pool.do(core.commands.ExcludeGpu(scene.keys[1], "repair"), 5.0)
    scene.release(1, 6.0)
    scene.see(7.0)


def wait_for_a_small_share_behind_a_large_one(core: Core) -> None:
    scene = Scene(core, gpus=2)
    scene.ask(1, 2.0, memory_mb=30_000.0)
    scene.ask(2, 3.0, memory_mb=40_000.0)
    scene.ask(3, 4.0, memory_mb=20_000.0)  # beside the second
    scene.ask(4, 5.0, memory_mb=50_000.0)  # keeps the first one's GPU
    scene.ask(5, 6.0, memory_mb=20_000.0)
    scene.release(3, 7.0)
    scene.see(8.0)


def wait_for_one_behind_who_waits_for_another(core: Core) -> None:
    scene = Scene(core, gpus=2)
    scene.ask(1, 2.0, among=("0",))
    scene.ask(2, 3.0, among=("1",))
    scene.ask(3, 4.0, among=("0",))
    scene.ask(4, 5.0)
    scene.release(2, 6.0)
    scene.see(7.0)


SCENES: dict[str, Callable[[Core], None]] = {
    "that several GPUs cannot be had says nothing about one": wait_for_one_behind_who_can_have_none,
    "who wants less memory is not kept waiting by who wants more in vain": wait_for_a_small_share_behind_a_large_one,
    "that some GPUs cannot be had says nothing about others": wait_for_one_behind_who_waits_for_another,
    "a lease is not counted twice": share_with_one_who_uses_more_than_he_asked_for,
    "at the memory threshold is not available": ask_at_the_memory_threshold,
    "at the utilization threshold is not available": ask_at_the_utilization_threshold,
    "a GPU is not free before its lease's processes are gone": release_while_the_process_stays,
    "a reading from before the end tells nothing": release_while_a_reading_is_under_way,
    "an orphan still belongs to its lease": release_while_an_orphan_stays,
    "the queue is looked at again when somebody who held GPUs leaves": leave_the_queue_with_a_gpu_held,
    "a wide request holds what it could use": look_again_with_a_gpu_held,
    "several GPUs are on one node, all or nothing": ask_for_two_where_all_but_one_are_held,
    "a stale reading is not granted": ask_long_after_the_last_look,
    "what can never be among the GPUs asked for is refused": ask_for_two_of_one,
    "only the GPUs that were asked for are granted": ask_for_two_of_three,
    "how several UUIDs begin names none of them": ask_for_how_two_uuids_begin,
    "a whole UUID names its GPU, however many others begin with it": ask_for_one_whose_uuid_begins_another,
    "nothing is held where there are not enough of the GPUs asked for": take_one_of_two_out_of_service,
    "the queue is looked at again when GPUs have other indices": renumber_a_gpu_that_is_taken,
    "time does not go back": ask_when_the_clock_was_set_back,
    "a GPU out of service is not granted": ask_for_what_is_out_of_service,
    "only who gave a GPU back may leave a context there": die_with_a_context_left,
    "more than a context is something left": release_while_the_process_stays,
    "what a process has left keeps nobody of that process out": the_same_asks_for_what_he_has_left,
    "what was taken away is not had back before it is free": ask_for_what_was_given_back_and_then_taken_away,
    "only what the own process has left does not count": two_leave_something_and_one_asks_again,
    "what a process has left is no way past somebody ahead": another_asks_for_what_a_process_has_left,
}


@pytest.mark.parametrize("rule", SCENES)
def test_the_real_pool_passes_every_scene(rule: str) -> None:
    SCENES[rule](REAL)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.rule)
def test_a_pool_without_the_rule_is_caught(mutant: Mutant, mutant_core: Core) -> None:
    play = SCENES.get(mutant.rule, search)

    with pytest.raises((AssertionError, AttributeError, KeyError, TypeError)):
        play(mutant_core)


def search(core: Core) -> None:
    """Random histories until a check fails."""
    machine = type("MutantMachine", (PoolMachine,), {"core": core})
    until_found = settings(
        max_examples=2000,
        stateful_step_count=40,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    run_state_machine_as_test(machine, settings=until_found)
