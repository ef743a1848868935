"""Each rule is removed in turn, and the property tests must notice: a check that cannot fail is no check.

A mutant is a copy of the core with one piece of text replaced, imported under a name of its own.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.core.gang_scenes import GANG_MUTANTS, GANG_SCENES
from tests.core.harness import REAL, Core
from tests.core.mutant import Mutant, loaded, read_mutants
from tests.core.plain_scenes import PLAIN_SCENES
from tests.core.pool_machine import PoolMachine
from tests.core.queue_mutants import QUEUE_MUTANTS
from tests.core.queue_scenes import QUEUE_SCENES
from tests.core.scenes import SCENES

PLAIN_MUTANTS = read_mutants(
    """
an exclusive GPU has one lease: slot
-return shared and self.is_shared and not self.is_draining and len
+return not self.is_draining and len
also: facts
-is_open_to_exclusive=not slot.occupants,
+is_open_to_exclusive=True,
a share is not beside a lease that declares no memory: slot
-return shared and self.is_shared and not
+return shared and not
committed memory stays below the limit: eligibility
-if use.committed_mb + wishes.memory_mb > limit_mb:
+if use.outside_mb + wishes.memory_mb > limit_mb:
a lease is not counted twice: slot
-slot.occupants, observed_mb)
-            unexplained_mb -= process.memory_mb
-
+slot.occupants, observed_mb)
+
outside memory counts: slot
-return MemoryUse(by_lease, max(unexplained_mb, 0.0))
+return MemoryUse(by_lease, 0.0)
at the memory threshold is not available: eligibility
-if percent >= thresholds.memory_percent:
+if percent > thresholds.memory_percent:
at the utilization threshold is not available: eligibility
-if utilization >= thresholds.utilization_percent and not (
+if utilization > thresholds.utilization_percent and not (
unknown is not zero: evolve_nodes
-        slot.reading = reading
-
+        slot.reading = replace(reading, utilization_percent=reading.utilization_percent or 0.0)
+
a GPU in use outside the pool is not granted: eligibility
-        if outside := _outside(state, slot, wishes):
-
+        if outside := None:
+
thresholds of a request decide about processes outside the pool: settings
-return self.outsiders == "avoid" or not wishes.has_thresholds
+return True
a process may have the GPU that it alone uses outside the pool: facts
-left_to=outside.roots if outside and not slot.occupants else NOBODY
+left_to=NOBODY
a GPU of another server is not granted: facts
-if reading.other_server is not None:
+if False:
also: eligibility
-if reading.other_server is not None:
+if False:
a stale reading is not granted: eligibility
-if now > stale_at(state, reading):
+if False:
a GPU with a fault is not granted: facts
-if reading.fault is not None or slot.key in excluded:
+if slot.key in excluded:
also: eligibility
-if reading.fault is not None:
+if False:
a GPU out of service is not granted: facts
- or slot.key in excluded:
+:
also: eligibility
-if excluded_because is not None:
+if False:
higher priority goes first: lease
--self.request.priority, self.seq)
+0, self.seq)
first come, first served: lease
--self.request.priority, self.seq)
+-self.request.priority, -self.seq)
that several GPUs cannot be had says nothing about one: serve
-if wishes.gpus >= gpus and wishes.nodes
+if wishes.nodes
a waiter for less memory is not kept waiting by one that asks for more in vain: serve
-and wishes.nodes >= nodes and memory_mb >= least_mb:
+and wishes.nodes >= nodes:
that some GPUs cannot be had says nothing about others: serve
-self._failed.setdefault((kept, terms, places), [])
+self._failed.setdefault((kept, terms, ANYWHERE), [])
several GPUs are on one node, all or nothing: placement
-if len(usable) >= wishes.gpus:
+if usable:
a share breaks no whole GPU while it fits beside others: placement
-yield (is_whole, left_mb,
+yield (not is_whole, left_mb,
a lease runs out: decide
-for lease_id in islice(state.ttl_due.due(state.live(now)), MOST_DUE):
+for lease_id in ():
renewing gives a full TTL: evolve
-state.restart_ttl(state.leases[lease_id], event.at)
+pass
fences grow: decide
-fence = 1 + max([state.fences.get(key.node, 0) for key in gpus])
+fence = 1
a GPU is not free before its lease's processes are gone: decide
-    if not left:
-
+    if True:
+
only a holder that released its GPU may leave a context there: decide
-    if not lease.was_left_by_holder or reading.processes is None:
-
+    if reading.processes is None:
+
a lease of a process that is watched does not run out: lease
-return None if is_watched else self.request.ttl_s
+return self.request.ttl_s
what another caller released drains until its processes are gone: lease
-return self.reason is EndReason.RELEASED and self.by is None
+return self.reason is EndReason.RELEASED
more than a context is something left: decide
-mb is not None and mb <= context_mb
+mb is not None
what a process has left does not keep that process out: facts
-is_open_to_shared=False, left_to=_left_to(slot))
+is_open_to_shared=False)
what a process has left is no way past a waiter ahead: serve
-if not any(is_suitable(state, slot, request_class.wishes) for request_class in ahead):
+if True:
only what the own process has left does not count: facts
-if len(processes) == 1 else NOBODY
+if processes else NOBODY
what was taken away is not had back before it is free: facts
-each.process if each.was_left else None for
+each.process for
a reading from before the end tells nothing: decide
-                and reading.at >= lease.drains_since
-
+
an orphan still belongs to its lease: slot
-holder, members = self.occupants[lease_id].process, self.members.get(lease_id, ())
+holder, members = self.occupants[lease_id].process, ()
what can never be served is refused: decide
-why_unservable(state, request.wishes) or
+None or
only the GPUs that were asked for are granted: eligibility
-if named is not None and slot.key not in named:
+if False:
how several UUIDs begin names none of them: facts
-if len(exact or alike) == 1 or not is_sure:
+if True:
a whole UUID names its GPU, however many others begin with it: facts
-if len(exact or alike) == 1 or not is_sure:
+if len(alike) == 1 or not is_sure:
what can never be among the GPUs asked for is refused: facts
-if is_there and (named is None or key in named) and facts.could_serve(wishes, thresholds):
+if is_there and facts.could_serve(wishes, thresholds):
the queue is looked at again when GPUs have other indices: facts
-            if found == known:
-
+            if found and found._replace(gpu_index=0.0, position=0.0) == (
+                known and known._replace(gpu_index=0.0, position=0.0)
+            ):
+
what is summed up of a node follows its GPUs: facts
-            node.sum_up(settings.thresholds.memory_percent)
-
+            pass
+
what is left out is not granted: facts
-frozenset(among - left_out)
+frozenset(among)
a GPU is as large as it must be: eligibility
-if wishes.min_memory_mb is not None and total_mb is not None and not
+if False and not
a GPU of any of several models is granted: request
-any(_matches(part, name) for part in pattern.split(","))
+_matches(pattern.split(",")[0], name)
time does not go back: decide
-max(now, state.clock))
+now)
the queue is served again when a waiter with a reservation leaves: evolve
-state.unsettle()  # what was kept for it is free for others
+pass
what is decided depends on the events alone: decide
-    found = serve_queue(state, now)
-
+    found = serve_queue(state, now)
+    state.next_seq += 1
+
after a reboot no local process is alive: decide_nodes
-gone = [lease for lease in _live(state) if lease.request.holder.process_on(node) is not None]
+gone: list[QueuedLease | ActiveLease] = []
after a restart every lease has a full TTL again: evolve_nodes
-    for lease in state.leases.values():
-        state.restart_ttl(lease, event.at)
-
+
a driver of another boot ends no lease when it takes over: decide_nodes
-    return [ev.TakenOver(
+    if state.boot_id not in (None, command.boot_id):
+        return [ended for node in sorted(state.nodes) for ended in _ended_by_reboot(state, node, now)]
+    return [ev.TakenOver(
also: decide_nodes
-def take_over(_: PoolState
+def take_over(state: PoolState
a reboot ends only what runs on that node: decide_nodes
-if lease.request.holder.process_on(node) is not None]
+if lease.request.holder.is_local]
a process counts only on its own node: request
-return self.process if self.node in (None, node) else None
+return self.process
what a process has left is for no process of another node: eligibility
-if holder.process_on(slot.key.node) is None or
+if
what was taken up is not withdrawn: state
-        self.untaken.discard(lease.id)
-
+
a waiter that did not call is passed over: serve
-if lease_id in state.passed_over or
+if lease_id in state.ended or
a waiter that did not call keeps its place: evolve
-waits = QueuedLease(lease.id, lease.request, lease.seq, lease.requested_at)
+waits = QueuedLease(lease.id, lease.request, lease.seq + 1000, lease.requested_at)
the answer to a request need not be taken up: decide
-if waited.requested_at == granted_at:
+if waited.requested_at > granted_at:
a waiter that has not called since the take-over has less time: evolve_nodes
-state.away = set(state.queue)
+state.away.clear()
a reading from before the take-over is void: decide
- or reading.at < state.taken_over:
+:
readings of a node count once it has announced itself: decide
-if reading.gpu.key.node not in state.announced or
+if
"""
)

MUTANTS = (*PLAIN_MUTANTS, *QUEUE_MUTANTS, *GANG_MUTANTS)
ALL_SCENES = {**SCENES, **PLAIN_SCENES, **QUEUE_SCENES, **GANG_SCENES}


@pytest.mark.parametrize("rule", ALL_SCENES)
def test_the_real_pool_passes_every_scene(rule: str) -> None:
    ALL_SCENES[rule](REAL)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.rule)
def test_a_pool_without_the_rule_is_caught(mutant: Mutant) -> None:
    play = ALL_SCENES.get(mutant.rule, search)

    with loaded(mutant) as core, pytest.raises((AssertionError, AttributeError, KeyError, TypeError, ValueError)):
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
