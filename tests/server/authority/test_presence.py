"""Who waits, who has left, and who was told that nothing could be written."""

from __future__ import annotations

import asyncio

import pytest

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.lease import ActiveLease
from gpu_worker_pool.server.authority.presence import MOST_WATCHED, ClientGone, Presence
from tests.ledger.test_driver import ask, look, opened, turns


async def test_one_caller_cannot_wait_for_any_number_of_leases() -> None:
    presence = Presence(await opened(), 10)
    with presence.watching(MOST_WATCHED - 5, "ada"):
        assert presence.has_room_for(5, "ada")
        assert not presence.has_room_for(6, "ada")
        assert presence.has_room_for(1000, "bob")
    assert presence.has_room_for(MOST_WATCHED, "ada")


async def test_a_lease_is_claimed_by_any_call_of_its_caller() -> None:
    presence = Presence(await opened(), 10)
    presence.note_unclaimed("a")
    first = presence.unclaimed("a")
    presence.note_heartbeat("b")
    assert presence.unclaimed("a") is first is not None
    presence.note_heartbeat("a")
    assert presence.unclaimed("a") is None
    presence.note_unclaimed("a")
    assert presence.unclaimed("a") is not first, "the time since the second 503 counts"


async def test_a_waiter_that_left_at_the_moment_of_its_grant_is_not_answered() -> None:
    driver = await opened()
    presence = Presence(driver, 10)
    for lease_id in ("holder", "waiter"):
        await driver.do(ask(lease_id))
    lease = driver.state.queued("waiter")
    gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(presence.wait(lease, 100.0, gone, renewed_by="ada"))
    await turns()
    gone.set_result(None)
    driver.note(cmd.Release("holder"))
    driver.note(look())
    assert isinstance(driver.state.leases["waiter"], ActiveLease)
    with pytest.raises(ClientGone):
        await waiting
    driver.close()


async def test_a_waiter_has_left_when_the_last_of_its_connections_breaks() -> None:
    driver = await opened()
    presence = Presence(driver, 10)
    for lease_id in ("holder", "waiter"):
        await driver.do(ask(lease_id))
    lease = driver.state.queued("waiter")
    first, last = (asyncio.get_running_loop().create_future() for _ in range(2))
    waits = [asyncio.ensure_future(presence.wait(lease, 100.0, gone, renewed_by="ada")) for gone in (first, last)]
    await turns()
    for gone, wait, has_left in ((first, waits[0], False), (last, waits[1], True)):
        gone.set_result(None)
        with pytest.raises(ClientGone):
            await wait
        assert ("waiter" in driver.state.away) is has_left
    driver.close()
