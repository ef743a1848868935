"""Each rule is removed in turn, and the property tests must notice: a check that cannot fail is no check.

A mutant is a copy of the core with one piece of text replaced, imported under a name of its own.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import gpu_worker_pool.core

from .harness import Core
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
    ),
    Mutant(
        "at the utilization threshold is not available",
        "eligibility",
        "if utilization >= thresholds.utilization_percent and not (",
        "if utilization > thresholds.utilization_percent and not (",
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
        "if reading is None or reading.fault is not None:",
        "if reading is None:",
        # The index and the judge both keep to it.
        also=("eligibility", "if reading.fault is not None:", "if False:"),
    ),
    Mutant(
        "a GPU out of service is not granted",
        "capacity",
        "if slot.key not in excluded and _is_measured(slot)",
        "if _is_measured(slot)",
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
        "if not somebody_reserves:",
        "if False:",
    ),
    Mutant(
        "several GPUs are on one node, all or nothing",
        "placement",
        "if len(usable) >= wishes.gpus:",
        "if usable:",
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
        "not members.get(lease_id) and reading.at >= lease.since",
        "reading.at >= lease.since",
    ),
    Mutant(
        "a reading from before the end tells nothing",
        "decide",
        "not members.get(lease_id) and reading.at >= lease.since",
        "not members.get(lease_id)",
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
    name = f"mutant_{abs(hash(mutant.rule)):x}"
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


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.rule)
def test_a_pool_without_the_rule_is_caught(mutant: Mutant, mutant_core: Core) -> None:
    machine = type("MutantMachine", (PoolMachine,), {"core": mutant_core})
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
    with pytest.raises((AssertionError, AttributeError, KeyError, TypeError)):
        run_state_machine_as_test(machine, settings=until_found)
