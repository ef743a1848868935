"""A candidate that fails goes on, and says so."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.ledger.postgres.database import PostgresDatabase
from gpu_worker_pool.server.authority import candidate as module
from gpu_worker_pool.server.authority.candidate import Candidate

SECRET = "not-to-be-seen"  # noqa: S105 - of nothing


class FaultyDatabase:
    """Fails in a way that nobody has thought of."""

    pool_id = ""

    def __init__(self) -> None:
        self.opened = 0
        self.was_opened_again = asyncio.Event()

    async def open(self) -> None:
        self.opened += 1
        if self.opened > 1:
            self.was_opened_again.set()
        raise ZeroDivisionError(SECRET)

    async def close(self) -> None:
        pass


async def test_after_an_error_of_its_own_it_says_so_and_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OPEN_AGAIN_S", 0.0)
    database = FaultyDatabase()
    said: list[str] = []
    state = SimpleNamespace(settings=PoolSettings())
    pool: Any = SimpleNamespace(follow=lambda _: None, say_trouble=said.append, state=state)
    unused: Any = None
    candidate = Candidate(
        pool, unused, cast("PostgresDatabase", database), lambda: 1.0, node="box", url="http://box:8000", spread_s=0.0
    )

    await candidate.start()
    await asyncio.wait_for(database.was_opened_again.wait(), 10.0)
    await candidate.stop()

    assert "this server failed (ZeroDivisionError); its log says more" in said[0]
    assert SECRET not in "".join(said)
