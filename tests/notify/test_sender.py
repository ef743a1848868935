"""Order, attempts and bounds."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.notify.notice import Notice
from gpu_worker_pool.notify.rules import AppriseUrl, Program
from gpu_worker_pool.notify.sender import MAX_AGE_S, MOST_FOR_ONE, Sender
from tests.notify.notices import NOTICE, rule
from tests.notify.receiver import receiver


def of(owner: str) -> Notice:
    return replace(NOTICE, owner=owner)


async def test_a_notice_that_was_not_taken_is_sent_again_before_later_ones() -> None:
    with receiver(503) as at:
        sender = Sender(boot_time)
        told = [rule(AppriseUrl(at.url))]
        sender.tell(of("ada"), told)
        await asyncio.to_thread(at.next)
        sender.tell(of("bob"), told)
        await sender.finish(60.0)
        assert [at.next().details["Owner"] for _ in range(2)] == ["ada", "bob"]


async def test_a_target_that_fails_is_logged_once_until_a_notice_arrives(caplog: pytest.LogCaptureFixture) -> None:
    fails = Program(("/bin/sh", "-c", 'test "$GPU_POOL_OWNER" = bob'))
    sender = Sender(boot_time)
    with caplog.at_level(logging.WARNING):
        for owner in ("ada", "eve", "bob", "ada"):
            sender.tell(of(owner), [rule(fails)])
        # Not `finish`, which gives up at the first failure.
        while len(sender):
            await next(iter(sender._tasks.values()))
    assert caplog.messages == ["the notice lost was not sent to /bin/sh: /bin/sh ended with 1"] * 2


async def test_no_more_than_a_bound_wait_for_a_target(caplog: pytest.LogCaptureFixture) -> None:
    with receiver(None) as at, caplog.at_level(logging.WARNING):
        sender = Sender(boot_time)
        for _ in range(MOST_FOR_ONE + 5):
            sender.tell(NOTICE, [rule(AppriseUrl(at.url))])
        assert len(sender) == MOST_FOR_ONE
        await asyncio.to_thread(at.next)
        await sender.finish(0.0)
    assert caplog.messages == [
        f"the notice lost was not sent to json://…: {MOST_FOR_ONE} notices wait for it already",
        f"notices that were not sent, because this program ends: {MOST_FOR_ONE}",
    ]


async def test_notices_that_grow_old_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    with receiver(500, 500, 500) as at, caplog.at_level(logging.WARNING):
        sender = Sender(lambda: now)
        for _ in range(3):
            sender.tell(NOTICE, [rule(AppriseUrl(at.url))])
        now = MAX_AGE_S + 1.0
        while len(sender):
            await next(iter(sender._tasks.values()))
        assert at.received.qsize() == 1
    assert len(caplog.messages) == 1
