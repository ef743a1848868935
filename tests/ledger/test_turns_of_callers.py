"""Callers take turns, and a heartbeat counts as of its arrival, however much waits before it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import inf

import pytest

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import ActiveLease, EndReason, QueuedLease
from gpu_worker_pool.ledger.driver import Driver
from gpu_worker_pool.ledger.fair_queue import MOST_OF_ONE_CALLER, FairQueue, TooManyCalls, WaitingCall
from gpu_worker_pool.ledger.hearing import LATE_S, ROUND_S, Hearing
from gpu_worker_pool.ledger.standstill import StandstillWatch
from gpu_worker_pool.ledger.turn import IDS_PER_COMMAND, MOST_COMMANDS, TURN_S

from .test_driver import Clock, ask, opened, turns

TTL_S = 2.0
UNKNOWN = tuple(f"unknown-{number}" for number in range(5 * IDS_PER_COMMAND))


def send(
    driver: Driver, commands: Sequence[cmd.Command], caller: str | None = None
) -> list[asyncio.Future[list[ev.Event]]]:
    return [asyncio.ensure_future(driver.do(command, caller)) for command in commands]


async def test_a_heartbeat_that_arrived_in_time_counts_though_other_work_is_before_it() -> None:
    clock = Clock()
    driver = await opened(clock=clock)
    await driver.do(ask("held", ttl_s=TTL_S))
    await driver.do(ask("queued", ttl_s=TTL_S))
    others = send(driver, [ask(f"other{number}") for number in range(5 * MOST_COMMANDS)])
    clock.now += TTL_S / 2
    (heartbeat,) = send(driver, [cmd.Renew(("held", "queued"))])
    await asyncio.sleep(0)
    clock.now += TTL_S  # what was queued before it goes on only now
    assert await heartbeat == [ev.LeasesRenewed(clock.now, ("held", "queued"))]
    await asyncio.gather(*others)
    assert isinstance(await driver.find("held"), ActiveLease)
    assert isinstance(await driver.find("queued"), QueuedLease)
    driver.close()


async def test_a_heartbeat_that_waits_saves_no_lease_that_was_over_when_it_arrived() -> None:
    clock = Clock()
    driver = await opened(clock=clock)
    await driver.do(ask("over", ttl_s=TTL_S))
    others = send(driver, [ask(f"other{number}") for number in range(5 * MOST_COMMANDS)])
    await asyncio.sleep(0)
    clock.now += TTL_S
    (heartbeat,) = send(driver, [cmd.Renew(("over",))])
    (refused,) = [event for event in await heartbeat if isinstance(event, ev.RenewalRefused)]
    assert (refused.lease_id, refused.reason) == ("over", EndReason.EXPIRED)
    await asyncio.gather(*others)
    driver.close()


async def test_a_heartbeat_whose_caller_left_keeps_no_lease() -> None:
    clock = Clock()
    driver = await opened(clock=clock)
    await driver.do(ask("held", ttl_s=TTL_S))
    others = send(driver, [ask(f"other{number}") for number in range(5 * MOST_COMMANDS)])
    (heartbeat,) = send(driver, [cmd.Renew(("held",))])
    await asyncio.sleep(0)
    heartbeat.cancel()
    clock.now += 1.5 * TTL_S
    await asyncio.gather(*others)
    assert not isinstance(driver.state.leases.get("held"), ActiveLease)
    driver.close()


async def test_many_calls_of_one_caller_do_not_come_before_the_first_of_another() -> None:
    driver = await opened()
    began: list[str] = []
    driver.early_listeners.append(
        lambda events: began.extend(event.lease_id for event in events if isinstance(event, ev.LeaseQueued))
    )
    asked = send(driver, [ask(f"ada{number}") for number in range(10 * MOST_COMMANDS)], "ada")
    asked += send(driver, [ask(f"bob{number}") for number in range(3)], "bob")
    await asyncio.gather(*asked)
    places = [began.index(f"bob{number}") for number in range(3)]
    # What the first turn took was ada's; from then on they alternate.
    assert places == [MOST_COMMANDS + 1, MOST_COMMANDS + 3, MOST_COMMANDS + 5]
    assert [id_ for id_ in began if id_.startswith("ada")] == [f"ada{number}" for number in range(10 * MOST_COMMANDS)]
    driver.close()


async def test_a_light_heartbeat_passes_the_other_calls_of_its_own_caller() -> None:
    driver = await opened()
    await driver.do(ask("held"), "ada")
    many = send(driver, [cmd.Renew(UNKNOWN)] * 50, "ada")
    (heartbeat,) = send(driver, [cmd.Renew(("held",))], "ada")
    await heartbeat
    assert sum(call.done() for call in many) < len(many) / 2
    await asyncio.gather(*many)
    driver.close()


async def test_a_caller_with_too_many_calls_is_refused_and_others_are_not() -> None:
    driver = await opened()
    await driver.do(ask("held"), "ada")
    calls = send(driver, [cmd.Renew(UNKNOWN)] * (MOST_OF_ONE_CALLER + 10), "ada")
    (heartbeat,) = send(driver, [cmd.Renew(("held",))], "ada")
    (others,) = send(driver, [ask("bobs")], "bob")
    await turns()
    refused = [call for call in calls if call.done() and isinstance(call.exception(), TooManyCalls)]
    assert refused
    assert calls[-len(refused) :] == refused, "those that came last"
    assert [type(event) for event in await heartbeat] == [ev.LeasesRenewed], "its own heartbeats go on"
    await others
    with pytest.raises(TooManyCalls, match=f"{MOST_OF_ONE_CALLER} calls of this caller wait"):
        await refused[0]
    await asyncio.gather(*(call for call in calls if call not in refused))
    driver.close()


async def test_callers_get_the_same_share_of_the_work_and_not_of_the_calls() -> None:
    queue = FairQueue()
    turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    heavy, light = WaitingCall(10, None, turn), WaitingCall(1, None, turn)
    for _ in range(3):
        queue.join("ada", heavy)
    for _ in range(20):
        queue.join("bob", light)
    order = [queue.pop().weight for _ in range(len(queue))]
    assert not queue
    assert order == [10, *[1] * 10, 10, *[1] * 10, 10]


def test_a_process_that_was_busy_is_not_said_to_have_stood_still() -> None:
    worked = Clock()
    watch = StandstillWatch(worked)
    assert watch.note_step(0.0) is None
    assert watch.note_step(3.0) is None
    worked.now += 4.0
    assert watch.note_step(8.0) == "was busy for 5.0 s"
    assert watch.note_step(13.0) == "stood still for 5.0 s (it was stopped, or its machine slept or was busy otherwise)"


class Work:
    """The processor time of a thread that works hard: whenever it is asked for, more has gone by."""

    def __init__(self, each_s: float) -> None:
        self.each_s, self.worked_s = each_s, 0.0

    def __call__(self) -> float:
        self.worked_s += self.each_s
        return self.worked_s


async def test_a_turn_ends_when_its_processor_time_is_over() -> None:
    driver = await opened(work_clock=Work(TURN_S / 5))
    held, began, turns_of = "held", list[str](), list[int]()
    await driver.do(ask(held))
    driver.early_listeners.append(
        lambda events: began.extend(event.lease_id for event in events if isinstance(event, ev.LeaseQueued))
    )
    ids = [f"ada{number}" for number in range(3 * MOST_COMMANDS)]
    asked = send(driver, [ask(lease_id) for lease_id in ids], "ada")
    await asyncio.sleep(0)
    (heartbeat,) = send(driver, [cmd.Renew((held,))], "bob")
    while len(began) < len(ids):
        before = len(began)
        await asyncio.sleep(0)
        turns_of.append(len(began) - before)
    assert max(turns_of) <= 5
    assert began == ids, "in order"
    assert isinstance((await heartbeat)[0], ev.LeasesRenewed)
    await asyncio.gather(*asked)
    driver.close()


async def test_a_loop_that_was_away_hears_what_arrived_before_a_lease_expires() -> None:
    clock = Clock()
    hearing = Hearing(clock)
    hearing.note_lateness(LATE_S / 2)
    assert hearing.until == inf
    hearing.note_lateness(3.0)
    clock.now += 1.0
    hearing.note_lateness(LATE_S)
    assert hearing.until == clock.now - 4.0
    hearing.note_lateness(LATE_S, was_there_at=90.0)
    assert hearing.until == 90.0
    rounds = 0
    while hearing.until < inf:
        rounds += 1
        await asyncio.sleep(ROUND_S)
    assert rounds > 1
