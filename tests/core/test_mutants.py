"""Each rule is removed in turn, and the property tests must notice: a check that cannot fail is no check.

A mutant is a copy of the core with one piece of text replaced, imported under a name of its own.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.core.gang_scenes import GANG_MUTANTS, GANG_SCENES
from tests.core.harness import REAL, Core
from tests.core.mutant import Mutant, loaded
from tests.core.plain_scenes import PLAIN_SCENES
from tests.core.pool_machine import PoolMachine
from tests.core.queue_mutants import QUEUE_MUTANTS
from tests.core.queue_scenes import QUEUE_SCENES
from tests.core.scenes import SCENES

PLAIN_MUTANTS = (
    Mutant(
        "an exclusive GPU has one lease",
        "slot",
        "return not self.is_shared and len(self.occupants) < workers_per_gpu",
        "return not self.is_shared",
    ),
    Mutant(
        "who shares does not share with who did not say how much he needs",
        "slot",
        "return self.is_shared and len(self.occupants) < max_sharers",
        "return len(self.occupants) < max_sharers",
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
        "self._observed_mb)\n                self._unexplained_mb -= process.memory_mb\n",
        "self._observed_mb)\n",
    ),
    Mutant(
        "outside memory counts",
        "slot",
        "return MemoryUse(self.by_lease, max(self._unexplained_mb, 0.0), self.leased_mb)",
        "return MemoryUse(self.by_lease, 0.0, self.leased_mb)",
        also=("slot", "return MemoryUse({}, max(reading.memory_used_mb, 0.0), 0.0)", "return MemoryUse({}, 0.0, 0.0)"),
    ),
    Mutant(
        "at the memory threshold is not available",
        "eligibility",
        "if percent >= thresholds.memory_percent:",
        "if percent > thresholds.memory_percent:",
        # The index keeps to it as well.
        also=(
            "node_index",
            "percent < limits.memory_percent",
            "percent <= limits.memory_percent",
        ),
    ),
    Mutant(
        "at the utilization threshold is not available",
        "eligibility",
        "if utilization >= thresholds.utilization_percent and not (",
        "if utilization > thresholds.utilization_percent and not (",
        also=(
            "node_index",
            "and load_percent < limits.utilization_percent",
            "and load_percent <= limits.utilization_percent",
        ),
    ),
    Mutant(
        "unknown is not zero",
        "evolve",
        "        slot.reading = reading\n",
        "        slot.reading = replace(reading, utilization_percent=reading.utilization_percent or 0.0)\n",
    ),
    Mutant(
        "a GPU in use outside the pool is not granted",
        "eligibility",
        "        if outside := _outside(state, slot, wishes):\n",
        "        if outside := None:\n",
        # The index keeps to it as well.
        also=(
            "node_index",
            "is_open_to_exclusive and is_below and outside is None,",
            "is_open_to_exclusive and is_below,",
        ),
    ),
    Mutant(
        "thresholds of a request decide about strangers",
        "placement",
        'if not (wishes.is_shared or settings.outsiders == "thresholds" or settings.avoids_outsiders(wishes)):',
        "if False:",
    ),
    Mutant(
        "a process is no stranger to itself",
        "assignment",
        "may_reclaim = state.reclaimable or state.capacity.used_outside_by",
        "may_reclaim = state.reclaimable",
    ),
    Mutant(
        "a GPU of another server is not granted",
        "node_index",
        "if reading.other_server is not None:",
        "if False:",
        also=("eligibility", "if reading.other_server is not None:", "if False:"),
    ),
    Mutant("a stale reading is not granted", "eligibility", "if now > stale_at(state, reading):", "if False:"),
    Mutant(
        "a GPU with a fault is not granted",
        "node_index",
        "is_measured = reading.fault is None and load_percent is not None",
        "is_measured = load_percent is not None",
        # The index and the judge both keep to it.
        also=("eligibility", "if reading.fault is not None:", "if False:"),
    ),
    Mutant(
        "a GPU out of service is not granted",
        "node_index",
        "if not is_measured or load_percent is None or slot.key in excluded:",
        "if not is_measured or load_percent is None:",
        # The index and the judge both keep to it.
        also=("eligibility", "if excluded_because is not None:", "if False:"),
    ),
    Mutant("higher priority goes first", "lease", "-self.request.priority, self.seq)", "0, self.seq)"),
    Mutant(
        "first come, first served",
        "lease",
        "-self.request.priority, self.seq)",
        "-self.request.priority, -self.seq)",
    ),
    Mutant(
        "that several GPUs cannot be had says nothing about one",
        "attempts",
        "if wishes.gpus >= gpus and wishes.nodes",
        "if wishes.nodes",
    ),
    Mutant(
        "who wants less memory is not kept waiting by who wants more in vain",
        "attempts",
        "and wishes.nodes >= nodes and memory_mb >= least_mb:",
        "and wishes.nodes >= nodes:",
    ),
    Mutant(
        "that some GPUs cannot be had says nothing about others",
        "attempts",
        "setdefault((kept, *_terms(wishes), *_places(wishes)), [])",
        "setdefault((kept, *_terms(wishes), *ANY), [])",
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
    Mutant(
        "a lease runs out",
        "decide",
        "for lease_id in islice(state.deadlines.due(state.live(now)), MOST_DUE):",
        "for lease_id in ():",
    ),
    Mutant(
        "renewing gives a full TTL",
        "evolve",
        "state.restart_deadline(state.leases[lease_id], event.at)",
        "pass",
    ),
    Mutant(
        "fences grow",
        "decide",
        "fence = 1 + max([fences.get(key.node, state.fences.get(key.node, 0)) for key in grant.gpus])",
        "fence = 1",
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
        "    if not lease.was_left_by_holder or reading.processes is None:\n",
        "    if reading.processes is None:\n",
    ),
    Mutant(
        "a lease of a process that is watched does not run out",
        "lease",
        "return None if is_watched else self.request.ttl_s",
        "return self.request.ttl_s",
    ),
    Mutant(
        "what another caller released drains until its processes are gone",
        "lease",
        "return self.ended.reason is EndReason.RELEASED and self.ended.by is None",
        "return self.ended.reason is EndReason.RELEASED",
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
        "may_reclaim = state.reclaimable or state.capacity.used_outside_by",
        "may_reclaim = state.capacity.used_outside_by",
    ),
    Mutant(
        "what a process has left is no way past somebody ahead",
        "reclaim",
        "keys[0] < queue_key and is_suitable",
        "keys[0] == queue_key and is_suitable",
    ),
    Mutant(
        "only what the own process has left does not count",
        "reclaim",
        "lease_id not in released",
        "not slot.occupants[lease_id].is_draining",
    ),
    Mutant(
        "what was taken away is not had back before it is free",
        "reclaim",
        "lease_id not in released",
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
        "holder, members = self.occupants[lease_id].process, self.members.get(lease_id, ())",
        "holder, members = self.occupants[lease_id].process, ()",
    ),
    Mutant(
        "what can never be served is refused",
        "decide",
        "why_unservable(state, request.wishes) or",
        "None or",
    ),
    Mutant(
        "only the GPUs that were asked for are granted",
        "eligibility",
        "slot.key not in state.capacity.named(wishes.among)",
        "False",
        # The index keeps to it as well.
        also=(
            "capacity",
            "named = self._names.find(wishes.among or ())",
            "named = {key for index in self._nodes.values() for key in index.facts}",
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
        "what can never be among the GPUs asked for is refused",
        "capacity",
        "return sum(_has_enough(makeup, wishes, thresholds) for makeup in named) >= wishes.nodes",
        "return True",
    ),
    Mutant(
        "the queue is looked at again when GPUs have other indices",
        "capacity",
        "or is_renamed or",
        "or",
    ),
    Mutant(
        "a node is listed again when a change of a GPU concerns the whole node",
        "capacity",
        "        self._list_later(node)\n",
        "        if is_new:\n            self._list_later(node)\n",
    ),
    Mutant("time does not go back", "decide", "max(now, state.clock))", "now)"),
    Mutant(
        "the queue is looked at again when somebody who held GPUs leaves",
        "evolve",
        "if _lose_claims(state, lease.id) or state.newcomers:",
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
        "decide_nodes",
        "elif lease.request.holder.process_on(node) is not None:",
        "elif False:",
    ),
    Mutant(
        "after a restart every lease has a full TTL again",
        "evolve_nodes",
        "    for lease in state.leases.values():\n        state.restart_deadline(lease, event.at)\n",
        "",
    ),
    Mutant(
        "a driver of another boot ends nobody when it takes over",
        "decide_nodes",
        "    return [ev.TakenOver(",
        "    if state.boot_id not in (None, command.boot_id):\n"
        "        return [ended for node in sorted(state.nodes) for ended in _ended_by_reboot(state, node, now)]\n"
        "    return [ev.TakenOver(",
        also=("decide_nodes", "def take_over(_: PoolState", "def take_over(state: PoolState"),
    ),
    Mutant(
        "a reboot ends only what runs on that node",
        "decide_nodes",
        "elif lease.request.holder.process_on(node) is not None:",
        "elif lease.request.holder.is_local:",
    ),
    Mutant(
        "a process counts only on its own node",
        "request",
        "return self.process if self.node in (None, node) else None",
        "return self.process",
    ),
    Mutant(
        "what a process has left is for no process of another node",
        "reclaim",
        "if waiter.holder.process_on(key.node) is None:",
        "if False:",
    ),
    Mutant(
        "a reading from before the take-over is void",
        "decide",
        " or reading.at < state.taken_over:",
        ":",
    ),
    Mutant(
        "readings of a node count once it has announced itself",
        "decide",
        "if reading.gpu.key.node not in state.announced or",
        "if",
    ),
    Mutant(
        "a GPU has one exclusive lease inside another",
        "sub_leases",
        "if others and (wishes.memory_mb is None or",
        "if False and (wishes.memory_mb is None or",
    ),
    Mutant(
        "leases inside another share what that one may use",
        "sub_leases",
        "if committed_mb + wishes.memory_mb > limit_mb:",
        "if False:",
    ),
    Mutant(
        "leases inside another end with it",
        "lease_ends",
        "for each in (*inside, lease)]",
        "for each in (lease,)]",
    ),
    Mutant(
        "waiters inside a lease are served when one has left",
        "inside",
        "                del self._waiting[parent]\n        self.unsettled.add(parent)\n",
        "                del self._waiting[parent]\n",
    ),
)

MUTANTS = (*PLAIN_MUTANTS, *QUEUE_MUTANTS, *GANG_MUTANTS)
ALL_SCENES = {**SCENES, **PLAIN_SCENES, **QUEUE_SCENES, **GANG_SCENES}


@pytest.mark.parametrize("rule", ALL_SCENES)
def test_the_real_pool_passes_every_scene(rule: str) -> None:
    ALL_SCENES[rule](REAL)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.rule)
def test_a_pool_without_the_rule_is_caught(mutant: Mutant) -> None:
    play = ALL_SCENES.get(mutant.rule, search)

    with loaded(mutant) as core, pytest.raises((AssertionError, AttributeError, KeyError, TypeError)):
        play(core)


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
