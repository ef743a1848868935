"""The pool of a box that cannot lead its fleet: it has no history of its own, and names the leader instead."""

from __future__ import annotations

import asyncio
from typing import Protocol

from .authority import Authority

LOOK_S = 0.5


class Follower(Protocol):
    @property
    def leader_url(self) -> str | None: ...

    @property
    def trouble(self) -> str | None: ...


class LedElsewhereSource:
    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._task: asyncio.Task[None] | None = None

    async def start(self, authority: Authority) -> None:
        self._task = asyncio.create_task(self._say(authority))
        await asyncio.sleep(0)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _say(self, authority: Authority) -> None:
        while True:
            url = self._follower.leader_url
            why = f"this box cannot lead the fleet; ask its leader, {url}" if url else self._follower.trouble
            authority.say_trouble(why or "this box cannot lead the fleet")
            await asyncio.sleep(LOOK_S)
