"""A condensed history adds up to the same pool as the long one."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import rule

from gpu_worker_pool.core.decider.condense import Condensed, condense
from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState
from tests.core import box_simulation
from tests.core.build import Box, key, process, reading
from tests.core.queue_machine import QueueMachine


class Journal:
    """What was journalled of a growing log, as it comes from the disk."""

    def __init__(self, log: list[ev.Event]) -> None:
        self._log, self._seen = log, 0
        self._events: list[ev.DurableEvent] = []

    def replayed(self, state: PoolState) -> PoolState:
        """What a restart makes of all of it."""
        fresh, self._seen = self._log[self._seen :], len(self._log)
        self._events += through_disk([event for event in fresh if isinstance(event, ev.DurableEvent)])
        return replay(PoolState(settings=state.settings), self._events)


@dataclass(frozen=True)
class ShortHistory:
    """The condensed history of a pool, as it comes from the disk, and the ended leases, which a journal keeps beside."""

    settings: PoolSettings
    ended: dict[str, EndedLease]
    events: list[ev.DurableEvent]

    @classmethod
    def of(cls, state: PoolState) -> Self:
        return cls(state.settings, dict(state.ended), through_disk(condense(state)))

    def replayed(self) -> PoolState:
        """What a restart makes of it."""
        return replay(PoolState(settings=self.settings, ended=OrderedDict(self.ended)), self.events)


def from_short(state: PoolState) -> PoolState:
    return ShortHistory.of(state).replayed()


def through_disk(events: list[ev.DurableEvent]) -> list[ev.DurableEvent]:
    """Copies that share no object with the pool. What a journal makes of them is the ledger's matter."""
    return pickle.loads(pickle.dumps(events))  # type: ignore[no-any-return]  # noqa: S301 - our own bytes


def details(state: PoolState) -> dict[str, Any]:
    """What equality of states leaves out, or what is worth a message of its own."""
    return {
        "processes": {id_: lease.request.holder.process for id_, lease in state.leases.items()},
        "ended processes": {id_: lease.request.holder.process for id_, lease in state.ended.items()},
        "occupants": {key: list(slot.occupants.items()) for key, slot in state.slots.items()},
        "members": {key: list(slot.members.items()) for key, slot in state.slots.items()},
        "queue": list(state.queue),
        "due": {id_: state.ttl_due.due_at(id_) for id_ in state.leases},
        "since": {id_: lease.drains_since for id_, lease in state.leases.items() if isinstance(lease, EndedLease)},
        "fences": state.fences,
        "next_seq": state.next_seq,
        "usage": state.usage,
        "last durations": state.last_durations_s,
        "quotas": state.quotas,
        "bookings": state.bookings,
        "limits": {id_: state.limit_due.due_at(id_) for id_ in state.leases},
        "clock": (state.clock, state.boot_id, state.wall_offset_s),
    }


def assert_alike(one: PoolState, other: PoolState) -> None:
    mine, others = details(one), details(other)
    for what, value in mine.items():
        assert value == others[what], what
    assert one == other


def check(state: PoolState, journal: Journal, now: float) -> None:
    """After a restart and after a reboot, condensed from the living pool or from a restored one."""
    assert state.boot_id is not None
    boots = ((state.boot_id, max(now, state.clock)), ("another boot", now + 1.0))
    restored = [journal.replayed(state) for _ in boots]
    of_living, of_restored = ShortHistory.of(state), ShortHistory.of(restored[0])
    for long, (boot_id, at) in zip(restored, boots, strict=True):
        short, shorter = of_living.replayed(), of_restored.replayed()
        for pool in (long, short, shorter):
            step(pool, cmd.TakeOver(1, boot_id, 7.0, 2e6), at)
            for node in sorted(pool.nodes):
                step(pool, cmd.AnnounceNode(node, boot_id), at)
        assert_alike(short, long)
        assert_alike(shorter, long)


class CondensingMachine(QueueMachine):
    """Looked at now and then, because each look replays all that happened so far."""

    @cached_property
    def journal(self) -> Journal:
        return Journal(self.pool.log)

    @rule()
    def adds_up_to_the_same(self) -> None:
        check(self.pool.state, self.journal, self.now)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.adds_up_to_the_same()


TestCondensing = CondensingMachine.TestCase
TestCondensing.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("seed", [1, 2])
def test_an_hour_of_a_busy_box_adds_up_to_the_same_at_any_minute(seed: int) -> None:
    box = box_simulation.opened(seed)
    box.at(0.0, box.observe_regularly)
    box.at(60.0, box.book)
    for _ in range(4):
        box.at(0.1, box.arrive)  # each is followed by another, so this is four times the usual rush
    box_simulation.tick(box)
    journal, seen = Journal(box.log), set[str]()
    for minute in range(1, 61):
        box.run(60.0 * minute)
        check(box.state, journal, box.now)
        seen |= {type(lease).__name__ for lease in box.state.leases.values()}
        assert len(condense(box.state)) <= 20 + 5 * len(box.state.leases) + 8 * len(box.state.slots)
    assert seen == {"QueuedLease", "ActiveLease", "EndedLease"}


def box_with_everything() -> Box:
    """Sharers that came in an order that is not that of their names, one of them draining on one of its two GPUs, a
    crowd waiting, a GPU out of service, a program that does not count.
    """
    box = Box(*(reading(index) for index in range(4)))
    box.ask("z", memory_mb=20_000, gpus=2, pid=11)
    box.ask("m", memory_mb=20_000, gpus=2, pid=12)
    box.ask("a", memory_mb=20_000, gpus=2, pid=13)
    box.observe_now(
        *(reading(index, processes=(process(111, 5_000, parents=(11,)), process(12, 5_000))) for index in range(4))
    )
    box.exclude(key(3), "repair")
    box.ignore("Xorg")
    box.ask("late", gpus=4, pid=14)
    box.ask("urgent", gpus=4, priority=5)
    box.ask("later", gpus=4)
    box.release("z")
    box.pass_time(3.0)
    first, _ = box.state.leases["z"].gpus  # type: ignore[union-attr]
    index = int(first.uuid[-1])
    box.observe_now(reading(index, processes=(process(12, 5_000),)))
    return box


def test_everything_at_once_adds_up_to_the_same() -> None:
    box = box_with_everything()
    half = box.state.leases["z"]
    assert isinstance(half, EndedLease)
    assert len(half.draining) == 1
    assert list(box.state.queue) == ["urgent", "late", "later"]

    check(box.state, Journal(box.log), box.now)

    short = from_short(box.state)
    assert list(short.queue) == ["urgent", "late", "later"]
    assert short.leases["late"].request.holder.process == ProcessId(14, 1.0)
    assert short.fences == box.state.fences
    assert short.next_seq == box.state.next_seq == 7


def test_both_go_on_alike() -> None:
    """The same looks, releases and requests lead to the same grants, fences and places in the queue."""
    box = box_with_everything()
    long, short = Journal(box.log).replayed(box.state), from_short(box.state)
    told: list[list[ev.Event]] = [[], []]
    for pool, events in zip((long, short), told, strict=True):
        now = box.now
        for command in (
            cmd.TakeOver(0, "boot1", 0.0, 1e6),
            cmd.AnnounceNode("box", "boot1"),
            cmd.Observe(tuple(reading(index, at=now) for index in range(4))),
            cmd.Configure("excluded", tuple(key(3))),
            cmd.Release("m"),
            cmd.Release("a"),
            cmd.Observe(tuple(reading(index, at=now + 1) for index in range(4))),
            cmd.Release("urgent"),
            cmd.Observe(tuple(reading(index, at=now + 2) for index in range(4))),
        ):
            now += 0.5
            events.extend(step(pool, command, now))
    assert told[0] == told[1]
    assert_alike(short, long)


def test_fences_and_places_go_on_growing_where_all_leases_are_gone() -> None:
    box = Box(reading(0))
    for lease_id in "abc":
        box.ask(lease_id)
        box.release(lease_id)
        box.observe_now(reading(0))
    short = from_short(box.state)
    assert short.leases == {}
    assert short.fences == {"box": 3}
    assert short.next_seq == 4


def test_a_pool_that_was_never_opened_condenses_to_its_counters() -> None:
    assert from_short(PoolState()) == PoolState()
    assert condense(PoolState()) == [ev.HistoryCondensed(float("-inf"), (), 1)]


def test_what_happens_after_the_copy_changes_nothing_of_the_history() -> None:
    """It is made in another thread, while the pool goes on."""
    box = Box(reading(0), reading(1))
    box.ask("holder", pid=7)
    box.ask("leaves")
    box.ask("waiter")
    box.observe_now(reading(0, used_mb=10, processes=(process(7, 10.0),)), reading(1))
    at_once, later = condense(box.state), Condensed(box.state)
    box.pass_time(10.0)
    box.release("leaves")
    box.release("waiter")
    box.ask("newcomer")
    box.observe_now(reading(0), reading(1))
    box.ignore("train")
    box.exclude(key(0), "dust")
    assert condense(box.state) != at_once
    assert list(later.events()) == list(later.events()) == at_once
