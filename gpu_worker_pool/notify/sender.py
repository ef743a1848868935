"""Sends notices to where rules say. Nothing waits for it: a notice is taken in at once, or dropped."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Callable, Iterable
from math import inf
from uuid import uuid4

from .courier import Courier, Failed
from .notice import Notice
from .pending import Delivery, Dropped, PendingNotices
from .rule import Mail, Rule, Target, Webhook

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


class Sender:
    """Must be made and used in one event loop. `clock` counts seconds and never goes back."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pending = PendingNotices()
        self._courier = Courier(os.environ)
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        # Targets whose last attempt failed, and whose last delivery was dropped: each is logged once, until one arrives again.
        self._failing: set[Target] = set()
        self._complained: set[Target] = set()

    def __repr__(self) -> str:
        return f"<Sender {len(self._pending)} waiting, {self._pending.sent} sent, {self._pending.dropped} dropped>"

    def __len__(self) -> int:
        """How many notices are still to be sent."""
        return len(self._pending)

    def tell(self, notice: Notice, rules: Iterable[Rule]) -> None:
        """Send this to the targets of those rules that it fits."""
        if self._is_closed:
            return
        for rule in rules:
            if rule.applies_to(notice):
                self._note(self._pending.add(Delivery(uuid4().hex, notice, rule, self._clock())))
        self._start()

    async def finish(self, within_s: float) -> None:
        """Send what can be sent in this time, and close."""
        until = self._clock() + within_s
        while (left_s := until - self._clock()) > 0 and len(self._pending):
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            elif (next_at := self._pending.next_at()) < until:
                await asyncio.sleep(max(next_at - self._clock(), 0.0))
            else:
                break
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if len(self._pending):
            logger.warning("%d notices were not sent, because this program ends", len(self._pending))

    def _start(self) -> None:
        if self._is_closed:
            return
        for delivery in self._pending.start(self._clock()):
            task = asyncio.ensure_future(self._attempt(delivery))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (at := self._pending.next_at()) < inf:
            self._timer = asyncio.get_running_loop().call_later(max(at - self._clock(), 0.0), self._start)

    async def _attempt(self, delivery: Delivery) -> None:
        try:
            failed = await self._courier.tell(delivery)
        except Exception as error:
            logger.exception("a notice could not be sent to %s", shown(delivery.rule))
            failed = Failed(type(error).__name__, is_final=True)
        if failed is None:
            self._pending.succeed(delivery)
            self._failing.discard(delivery.rule.target)
            self._complained.discard(delivery.rule.target)
        else:
            dropped = self._pending.fail(
                delivery,
                self._clock(),
                failed.why,
                is_final=failed.is_final,
                jitter=random.random(),  # noqa: S311 - no secret
                after_s=failed.after_s,
            )
            self._note(dropped)
            if dropped is None and delivery.rule.target not in self._failing:
                self._failing.add(delivery.rule.target)
                logger.warning("%s: %s; it is tried again for up to an hour", shown(delivery.rule), failed.why)
        self._start()

    def _note(self, dropped: Dropped | None) -> None:
        if dropped is None:
            return
        notice, rule = dropped.delivery.notice, dropped.delivery.rule
        if rule.target not in self._complained:
            self._complained.add(rule.target)
            logger.error("the notice %s was not sent to %s: %s", notice.occasion, shown(rule), dropped.why)


def shown(rule: Rule) -> str:
    """The target of a rule in a log, and its number in the operator's file. What comes after a URL's host may be secret."""
    target = rule.target
    if isinstance(target, Webhook):
        where = "/".join(target.url.split("/", 3)[:3])
    else:
        where = target.address if isinstance(target, Mail) else target.arguments[0]
    return where if rule.number is None else f"hook {rule.number} ({where})"
