"""Calls are carried out first come, first served, and a turn of the event loop has a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.ledger.driver import MOST_OF_ONE_CALLER, TURN_S, Driver, TooManyCalls

from .test_driver import Work, ask, opened, turns


def send(
    driver: Driver, commands: Sequence[cmd.Command], caller: str | None = None
) -> list[asyncio.Future[list[ev.Event]]]:
    return [asyncio.ensure_future(driver.do(command, caller)) for command in commands]


async def test_calls_are_carried_out_in_the_order_in_which_they_came() -> None:
    driver = await opened(work_clock=Work(TURN_S / 5))
    began: list[str] = []
    driver.early_listeners.append(lambda events: began.extend(ev.new_leases(events)))
    ids = [f"ada{number}" for number in range(36)] + [f"bob{number}" for number in range(3)]
    await asyncio.gather(*(call for id_ in ids for call in send(driver, [ask(id_)], id_[:3])))
    assert began == ids
    driver.close()


async def test_a_caller_with_too_many_calls_is_refused_and_others_are_not() -> None:
    driver = await opened(work_clock=Work(TURN_S / 5))
    await driver.do(ask("held"), "ada")
    calls = send(driver, [cmd.Renew(("held",))] * (MOST_OF_ONE_CALLER + 20), "ada")
    (others,) = send(driver, [ask("bobs")], "bob")
    await turns()
    refused = [call for call in calls if call.done() and isinstance(call.exception(), TooManyCalls)]
    assert refused
    assert calls[-len(refused) :] == refused, "those that came last"
    await others
    with pytest.raises(TooManyCalls, match=f"{MOST_OF_ONE_CALLER} calls of this caller wait"):
        await refused[0]
    await asyncio.gather(*(call for call in calls if call not in refused))
    driver.close()


async def test_a_turn_ends_when_its_processor_time_is_over() -> None:
    driver = await opened(work_clock=Work(TURN_S / 5))
    held, began, turns_of = "held", list[str](), list[int]()
    await driver.do(ask(held))
    driver.early_listeners.append(lambda events: began.extend(ev.new_leases(events)))
    ids = [f"ada{number}" for number in range(36)]
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
