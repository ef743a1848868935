"""Drives a core (the real one, or a mutant of it) and holds everything it does against the plain model."""

from __future__ import annotations

import importlib
import pickle
from bisect import bisect_right
from typing import Any

import pytest

from tests.core.plain_gpus import FOREVER, Lease
from tests.core.plain_model import Model, Outcome
from tests.core.queue_checks import QueueChecks


class Core:
    """The modules of a core under one name, so that a mutant can take the real one's place."""

    MODULES = (
        "model.commands",
        "model.configured",
        "decider.condense",
        "decider.decide",
        "model.events",
        "decider.evolve",
        "decider.forecast",
        "queue.eligibility",
        "queue.explain",
        "model.gpu",
        "decider.step",
        "model.request",
        "queue.owners",
        "model.settings",
        "model.state",
    )

    def __init__(self, package: str = "gpu_worker_pool.core") -> None:
        for module in self.MODULES:
            setattr(self, module.partition(".")[2], importlib.import_module(f"{package}.{module}"))

    def __getattr__(self, module: str) -> Any:  # for the type checker: the modules are set above
        raise AttributeError(module)


REAL = Core()


class CheckedPool(QueueChecks):
    """A pool of which every step is checked against the model, the journal and the promises."""

    def __init__(self, core: Core = REAL, **settings: Any) -> None:
        self.core = core
        self.settings = core.settings.PoolSettings(**settings)
        self.state = core.state.PoolState(settings=self.settings)
        # Fed with the events alone, as a restart would be: it must be equal at every step.
        self.shadow = core.state.PoolState(settings=self.settings)
        self.log: list[Any] = []
        self.step_ends = [0]
        self.model = Model(self.settings)
        # Whose the processes were when they were last seen.
        self.seen: dict[tuple[Any, str], set[Any]] = {}
        # What looks at the queue found in this step, before each grant.
        self.outcomes: list[Outcome] = []
        # The leases that the present step has granted.
        self.just_granted: set[str] = set()
        # Those whose warnings it has withdrawn.
        self.just_withdrawn: set[str] = set()

    def take_over(self, now: float, boot_id: str = "boot", wall_offset_s: float = 0.0, *, node: str = "box") -> None:
        """A driver takes charge, and the node with these boot ids announces itself."""
        self.do(self.core.commands.TakeOver(0, boot_id, 0.0, wall_offset_s), now)
        self.do(self.core.commands.AnnounceNode(node, boot_id), now)

    def do(self, command: Any, now: float) -> list[Any]:
        assert self.core.decide.decide(self.state, command, now) == self.core.decide.decide(self.state, command, now)
        assert self.state == self.shadow, "deciding has changed the state"
        is_reboot = (
            isinstance(command, self.core.commands.AnnounceNode)
            and self.model.boot_ids.get(command.node, command.boot_id) != command.boot_id
        )
        # Time does not go back behind anything that has happened.
        self.model.now = max(now, self.state.clock)
        self.just_granted.clear()
        self.just_withdrawn.clear()
        events: list[Any] = self.core.step.step(self.state, command, now)
        self.log += events
        self.step_ends.append(len(self.log))
        self.new_booking, self.observed = None, ()
        self.is_opening = isinstance(command, self.core.commands.TakeOver | self.core.commands.LoseTime)
        self._read_use()
        for event in events:
            self._check(event, command)
        assert not self._queued_first(events) & self.just_granted, "a lease that is granted at once was queued"
        self.outcomes.clear()
        self.core.evolve.replay(self.shadow, pickle.loads(pickle.dumps(events)))  # noqa: S301 - our own bytes
        self._check_state()
        if is_reboot:
            alive = [lease for lease in self.model.leases.values() if self._ran_on(lease, command.node)]
            assert not any(lease.state != "draining" for lease in alive), "a local process has outlived a reboot"
        return events

    def _queued_first(self, events: list[Any]) -> set[str]:
        """The leases that were queued. One for which another is told to make room may have a GPU at once after all: with that
        on its way out, an earlier waiter needs another one no more.
        """
        ev, queued = self.core.events, set[str]()
        for event in events:
            if isinstance(event, ev.LeaseQueued):
                queued.add(event.lease_id)
            elif isinstance(event, ev.LeaseWarned) and event.reason == "preempted":
                queued.clear()
        return queued

    # After every step

    def _check_state(self) -> None:
        if len(self.log) % 3 == 0 and not self.is_opening:
            self.check_forecast(len(self.log))
        assert self.state == self.shadow, "replaying the events gives another state"
        model, state = self.model, self.state
        self._check_queue()
        assert set(model.leases) == set(state.leases)
        self._check_facts()
        for lease in model.leases.values():
            # What is due when a driver comes back ends with the first tick.
            assert self.is_opening or lease.due > model.live, "a lease has outlived its time"
            assert state.ttl_due.due_at(lease.id) == (None if lease.due == FOREVER else lease.due)
        for lease_id in state.queue:
            explanation = self.core.explain.explain(state, lease_id, model.now)
            assert explanation is not None
            assert str(explanation)
            assert explanation.position == [lease.id for lease in model.queue()].index(lease_id) + 1

    def check_forecast(self, number: int) -> None:
        """Of one request that is not made, which depends on a number: it fares as was told when it is made in a copy of the pool.
        Where leases make room, what waiters count on may change with each pass over the queue, so there only an example is held
        against it.
        """
        if self.model.groups:
            return  # where a group goes first, a request that is made changes what those ahead of it may have
        now, asked = self.model.now, self.core.request
        owner, model, gpus = (None, "ada")[number % 2], (None, "A100", "T4")[number // 5 % 3], 1 + number // 2 % 2
        request = asked.Request(asked.Wishes(gpus=gpus, model=model), asked.Holder(owner=owner))
        forecasts = self.core.forecast.Forecasts(self.state, now, [request.wishes], owner)
        list(forecasts.steps())
        (found,) = forecasts.found
        copy = pickle.loads(pickle.dumps(self.state))  # noqa: S301 - our own bytes
        events = self.core.step.step(copy, self.core.commands.RequestLease("new", request), now)
        lease = copy.leases.get("new")
        if lease is None:
            (refused,) = (event.why for event in events if isinstance(event, self.core.events.Refused))
            assert found.why == refused
        elif copy.preempt_warned:
            return
        elif isinstance(lease, self.core.state.ActiveLease):
            assert found.when == "now", "a request is granted that was told to wait"
        else:
            times = self.core.forecast.StartTimes(copy, now)
            list(times.steps())
            start = times.starts.get("new")
            assert found.when == ("unknown" if start is None else "later")
            if start is not None:
                assert found.start.at == pytest.approx(start.at), "another start is expected than was told"
                assert found.start.basis == start.basis

    def _check_facts(self) -> None:
        """The facts that are kept are those that the slots give when all is derived again."""
        state = self.state
        derived = type(state.facts)()
        derived.refresh(state.slots.keys(), state.slots, state.settings, state.excluded, state.ignored_processes)
        assert state.facts == derived, "the kept facts are not those that the slots give"

    def check_replay(self) -> None:
        """From the start at once, in two parts, and from what the journal keeps. The parts are of whole steps: between
        the events of one, the queue may seem to need a look that it does not need after all of them.
        """
        fresh = self.core.state.PoolState
        replay = self.core.evolve.replay
        assert replay(fresh(settings=self.settings), self.log) == self.state
        quarters = {self._step_end(len(self.log) * number // 4) for number in (1, 2, 3)}
        for prefix in quarters - {0, len(self.log)}:
            first = replay(fresh(settings=self.settings), self.log[:prefix])
            assert replay(first, self.log[prefix:]) == self.state
        durable = [event for event in self.log if isinstance(event, self.core.events.DurableEvent)]
        restored = replay(fresh(settings=self.settings), durable)
        for what in (
            "leases",
            "ended",
            "queue",
            "fences",
            "next_seq",
            "excluded",
            "ignored_processes",
            "boot_id",
            "nodes",
            "usage",
            "last_durations_s",
            "quotas",
            "groups",
            "bookings",
            "preemptible",
            "preempt_warned",
            "limit_due",
        ):
            assert getattr(restored, what) == getattr(self.state, what), what
        self._check_condensed(restored)

    def _step_end(self, position: int) -> int:
        """The end of the last step that is over at this place of the log."""
        return self.step_ends[bisect_right(self.step_ends, position) - 1]

    def _check_condensed(self, restored: Any) -> None:
        """What a journal is compacted to must be as good as the whole of it, once the pool is opened again."""
        short = self.core.condense.condense(self.state)
        fresh = self.core.state.PoolState(settings=self.settings, ended=self.state.ended.copy())
        condensed = self.core.evolve.replay(fresh, pickle.loads(pickle.dumps(short)))  # noqa: S301 - our own bytes
        reopen = self.core.commands.TakeOver(self.state.epoch, self.state.boot_id or "", 7.0, self.state.wall_offset_s)
        for pool in (condensed, restored):
            self.core.step.step(pool, reopen, self.state.clock + 1.0)
        assert condensed == restored
        orders = [{key: list(slot.occupants) for key, slot in pool.slots.items()} for pool in (condensed, restored)]
        assert orders[0] == orders[1], "leases came to a GPU in another order"
        processes = [[lease.request.holder.process for lease in pool.leases.values()] for pool in (condensed, restored)]
        assert sorted(map(str, processes[0])) == sorted(map(str, processes[1]))

    # Every event

    def _check(self, event: Any, command: Any) -> None:
        assert event.at == self.model.now, "time has gone back, or ahead"
        getattr(self, f"_{type(event).__name__}", self._nothing)(event, command)

    def _nothing(self, event: Any, command: Any) -> None:
        assert isinstance(event, self.core.events.Refused)

    def _TakenOver(self, event: Any, command: Any) -> None:  # noqa: N802
        model = self.model
        model.wall, model.taken_over, model.epoch = event.wall_offset_s, event.at, event.epoch
        model.lost_s = 0.0
        model.announced.clear()
        model.readings.clear()
        model.busy.clear()
        model.reservation, model.claims = None, {}
        model.away = {lease.id for lease in model.waiting()}
        for lease in model.leases.values():
            lease.is_untaken = lease.is_passed_over = False
            is_draining, lease.began = lease.state == "draining", -FOREVER
            lease.due = model.live + (self.settings.drain_limit_s if is_draining else model.lasts_s(lease))

    def _NodeJoined(self, event: Any, command: Any) -> None:  # noqa: N802
        self.model.boot_ids.setdefault(event.node, event.boot_id)
        assert self.model.boot_ids[event.node] == event.boot_id
        for gpu in event.gpus or ():
            key = self.core.gpu.GpuKey(event.node, gpu.uuid)
            self.model.inventory[key] = (gpu.index, gpu.name, gpu.memory_total_mb)

    def _NodeRebooted(self, event: Any, command: Any) -> None:  # noqa: N802
        model = self.model
        assert model.boot_ids[event.node] != event.boot_id
        model.boot_ids[event.node] = event.boot_id
        for key in [key for key in {**model.readings, **model.busy} if key.node == event.node]:
            model.readings.pop(key, None)
            model.busy.pop(key, None)
        for lease in model.leases.values():
            if lease.state == "active" and any(key.node == event.node for key in lease.gpus):
                lease.due, lease.is_untaken = model.live + model.lasts_s(lease), False

    def _NodeAnnounced(self, event: Any, command: Any) -> None:  # noqa: N802
        self.model.announced.add(event.node)

    def _NodeSilenced(self, event: Any, command: Any) -> None:  # noqa: N802
        model = self.model
        model.announced.remove(event.node)
        for key in [key for key in {**model.readings, **model.busy} if key.node == event.node]:
            model.readings.pop(key, None)
            model.busy.pop(key, None)

    @staticmethod
    def _ran_on(lease: Lease, node: str) -> bool:
        holder = lease.request.holder
        return holder.process is not None and holder.node in {None, node}

    def _LeaseQueued(self, event: Any, command: Any) -> None:  # noqa: N802
        assert event.requested_at == event.at + self.model.wall
        self._add(event)

    def _add(self, event: Any) -> None:
        assert event.seq > max((lease.seq for lease in self.model.leases.values()), default=0)
        due, asked_at = self.model.live + event.request.ttl_s, event.at + self.model.wall
        self.model.leases[event.lease_id] = Lease(event.lease_id, event.request, event.seq, due, asked_at)

    def _LeaseGranted(self, event: Any, command: Any) -> None:  # noqa: N802
        model = self.model
        if event.request is not None:
            assert event.requested_at is None
            self._add(event)
        self.outcomes.append(model.look())
        # What the last look reserved stays reserved while nothing happens but that one waiter comes.
        expected = [found for found in (model.next_served(), model.next_served(as_settled=True)) if found is not None]
        assert expected, "no waiter could be served"
        fitting = [(lease, options) for lease, options in expected if lease.id == event.lease_id]
        assert fitting, "the wrong waiter is served"
        lease, options = max(fitting, key=lambda each: set(event.gpus) <= set().union(*each[1]))
        self._check_parts(event, lease.request.wishes)
        places = [(key.node, model.readings[key].gpu.index) for key in event.gpus]
        assert places == sorted(places)
        assert set(event.gpus) <= set().union(*options), "GPUs that it may not take"
        # Of GPUs that it may have only because its own process uses them, it gets any.
        if (
            len(event.gpus) == 1
            and not model.on(event.gpus[0])
            and model.is_usable(event.gpus[0], lease.request.wishes)
        ):
            cost = model.cost(event.gpus[0], lease.request.wishes)
            best = min(model.cost(key, lease.request.wishes) for option in options for key in option)
            assert cost == pytest.approx(best), "not the best of the GPUs"
        self._activate(lease, event)
        self.just_granted.add(lease.id)

    def _check_parts(self, event: Any, wishes: Any) -> None:
        """As many GPUs on each of as many nodes as are wished for, and a fence that is new to each of these."""
        model, nodes = self.model, [key.node for key in event.gpus]
        assert len(set(event.gpus)) == len(event.gpus) == wishes.gpus * wishes.nodes
        assert [nodes.count(node) for node in dict.fromkeys(nodes)] == [wishes.gpus] * wishes.nodes
        for node in set(nodes):
            assert event.fence > model.fences.get(node, 0), "a fence that does not grow"
            model.fences[node] = event.fence

    def _activate(self, lease: Lease, event: Any) -> None:
        model, request = self.model, lease.request
        lease.state, lease.gpus, lease.fence, lease.granted_at = "active", event.gpus, event.fence, event.granted_at
        lease.due, lease.began = model.live + model.lasts_s(lease), event.at
        self._check_take_up(lease, event)
        limit_s = model.limit_s(request)
        lease.limit = None if limit_s is None else event.at + limit_s
        assert event.limit == lease.limit, "the wrong time limit"
        lease.weight = sum(
            1000
            if request.wishes.memory_mb is None
            else max(1, min(1000, round(1000 * request.wishes.memory_mb / model.readings[key].memory_total_mb)))
            for key in event.gpus
        )
        assert lease.weight == (1000 * len(event.gpus) if event.weight is None else event.weight)
        model.busy.update(dict.fromkeys(event.gpus, event.at))
        self._lose_claims(lease)

    def _check_take_up(self, lease: Lease, event: Any) -> None:
        """A grant that was waited for is to be taken up; sooner by a client that has left."""
        within_s, settings = event.take_up_s, self.settings
        if settings.take_up_s is None or lease.asked_at == event.granted_at:
            assert within_s is None, "a grant that was not waited for is to be taken up"
            return
        most_s = settings.away_take_up_s if lease.id in self.model.away else settings.take_up_s
        assert within_s == min(most_s, lease.request.ttl_s / 2)
        lease.due, lease.is_untaken = self.model.live + within_s, True

    def _GrantWithdrawn(self, event: Any, command: Any) -> None:  # noqa: N802
        lease, model = self.model.leases[event.lease_id], self.model
        assert lease.is_untaken, "a grant is withdrawn that was taken up"
        assert lease.due <= model.live, "a grant is withdrawn too early"
        in_use = [key for key in lease.gpus if model.members.get((key, lease.id))]
        assert not in_use, "a grant is withdrawn whose GPUs are in use"
        model.spans.setdefault(lease.owner, []).append((lease.weight, lease.granted_at, event.at + model.wall))
        for key in lease.gpus:
            model.readings.pop(key, None)
            model.busy.pop(key, None)
            model.members.pop((key, lease.id), None)
        waits = Lease(lease.id, lease.request, lease.seq, model.live + lease.request.ttl_s, lease.asked_at)
        waits.is_passed_over = True
        model.leases[lease.id] = waits

    def _ClientLeft(self, event: Any, command: Any) -> None:  # noqa: N802
        assert self.model.leases[event.lease_id].state == "queued"
        self.model.away.add(event.lease_id)

    def _TimeLost(self, event: Any, command: Any) -> None:  # noqa: N802
        self.model.lost_s += event.lost_s

    def _LeasesRenewed(self, event: Any, command: Any) -> None:  # noqa: N802
        for lease_id in event.lease_ids:
            lease = self.model.leases[lease_id]
            is_renewable = lease.state == "active" and (lease.is_untaken or not self.model.epoch)
            assert lease.state == "queued" or is_renewable
            lease.due = self.model.live + self.model.lasts_s(lease)
            lease.is_untaken = lease.is_passed_over = False
            self.model.away.discard(lease_id)

    def _LeaseEnded(self, event: Any, command: Any) -> None:  # noqa: N802
        lease = self.model.leases[event.lease_id]
        assert lease.state in {"queued", "active"}
        self.model.away.discard(lease.id)
        if event.reason == "expired":
            was_told = isinstance(command, self.core.commands.EndLease) and command.lease_id == lease.id
            assert was_told or lease.due <= self.model.live, "a lease has ended before its time"
        elif event.reason in {"time_limit", "preempted", "idle"}:
            assert lease.ending is not None, "ended without its warning"
            assert lease.ending[0] == event.reason, "ended without its warning"
            assert lease.ending[1] <= self.model.now, "ended before its time"
        elif isinstance(command, self.core.commands.AnnounceNode):
            assert self._ran_on(lease, command.node), "ended by the reboot of another node"
        else:
            assert command.lease_id == lease.id
            is_release = isinstance(command, self.core.commands.Release)
            assert (event.by is None) == (not is_release or command.is_holder)
        must_drain = {
            key
            for key in lease.gpus
            if self.settings.awaits_reading_after_release or self.model.members.get((key, lease.id))
        }
        if isinstance(command, self.core.commands.AnnounceNode) and event.reason == "holder_died":
            must_drain = {key for key in must_drain if key.node != command.node}
        assert set(event.draining) == must_drain
        self._count_use(lease, event)
        self._lose_claims(lease)
        for key in set(lease.gpus) - must_drain:
            self.model.members.pop((key, lease.id), None)
        if event.draining:
            lease.state, lease.gpus, lease.since = "draining", event.draining, event.at
            lease.how = event.reason if event.by is None else "by another"
            lease.due = self.model.live + self.settings.drain_limit_s
        else:
            del self.model.leases[lease.id]

    def _GpuDrained(self, event: Any, command: Any) -> None:  # noqa: N802
        lease = self.model.leases[event.lease_id]
        assert lease.state == "draining"
        if self._is_taken_over(lease, event.gpu):
            assert lease.how == "released", "what was taken away is had back before it is free"
        elif isinstance(command, self.core.commands.Observe) and lease.due > self.model.live:
            reading = self.model.readings[event.gpu]
            assert reading.at >= lease.since, "drained by a reading from before the end"
            left = self.model.members.get((event.gpu, lease.id), set())
            weights = [p.memory_mb for p in reading.processes or () if tuple(p.id) in left]
            only_contexts = lease.how == "released" and max(weights, default=0) <= self.settings.context_mb
            assert not left or only_contexts, "drained although a process is left"
        elif isinstance(command, self.core.commands.AnnounceNode) and lease.due > self.model.live:
            assert event.gpu.node == command.node
        else:
            assert lease.due <= self.model.live
        lease.gpus = tuple(key for key in lease.gpus if key != event.gpu)
        self.model.members.pop((event.gpu, lease.id), None)
        if not lease.gpus:
            del self.model.leases[lease.id]

    def _is_taken_over(self, drained: Lease, gpu: Any) -> bool:
        """Whether the process has just been granted the GPU again, as the same owner."""
        process, owner = self.model.process_on(gpu, drained), drained.request.holder.owner
        return process is not None and any(
            (self.model.process_on(gpu, lease), lease.request.holder.owner) == (process, owner)
            for lease in self.model.on(gpu)
            if lease.id in self.just_granted
        )

    def _LeasesMeasured(self, event: Any, command: Any) -> None:  # noqa: N802
        assert isinstance(command, self.core.commands.Observe)
        assert all(use.is_known and self.model.leases[use.lease_id].state == "active" for use in event.uses)

    def _ProcessesAttributed(self, event: Any, command: Any) -> None:  # noqa: N802
        mine = self.seen.get((event.gpu, event.lease_id))
        if mine is None:
            draining = [lease for lease in self.model.on(event.gpu) if lease.state == "draining"]
            assert all(self._is_taken_over(lease, event.gpu) for lease in draining)
            mine = set().union(*(self.model.members.get((event.gpu, lease.id), set()) for lease in draining))
        assert {tuple(process) for process in event.processes} == mine
        self.model.members[event.gpu, event.lease_id] = mine

    def _GpusObserved(self, event: Any, command: Any) -> None:  # noqa: N802
        self.observed = tuple(reading.gpu.key for reading in event.readings)
        for reading in event.readings:
            key = reading.gpu.key
            assert self.model.taken_over <= reading.at <= self.model.now, "a reading from before the take-over"
            assert key.node in self.model.announced, "a reading of a node that has not announced itself"
            assert self.model.inventory[key][:2] == (reading.gpu.index, reading.gpu.name)
            assert reading.memory_total_mb in {None, self.model.inventory[key][2]}
            known = self.model.readings.get(key)
            was_away = known is None or reading.at - known.at > self.settings.stale_after_s
            self.model.readings[key] = reading
            load = reading.utilization_percent
            if key not in self.model.busy or was_away or load is None or load >= self.settings.computing_percent:
                # What it did while it was not read is unknown.
                self.model.busy[key] = max(reading.at, self.model.busy.get(key, self.model.now))
            for lease in self.model.on(key):
                mine = {tuple(p.id) for p in reading.processes or () if self.model.is_mine(key, lease, p)}
                self.seen[key, lease.id] = mine

    def _Configured(self, event: Any, command: Any) -> None:  # noqa: N802
        getattr(self, f"_set_{event.table}")(event, command)

    def _set_excluded(self, event: Any, command: Any) -> None:
        (self.model.excluded.discard if event.value is None else self.model.excluded.add)(
            self.core.gpu.GpuKey(*event.key)
        )

    def _set_ignored_processes(self, event: Any, command: Any) -> None:
        (self.model.ignored.discard if event.value is None else self.model.ignored.add)(event.key[0])
