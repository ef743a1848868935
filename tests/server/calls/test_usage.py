"""GET /usage: GPU-hours by owner, from a journal that has a past, and from what is held now."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.core.model.request import Holder, Request
from gpu_worker_pool.ledger.accounts import Moment, SqliteAccounts, Usage, UsageTotals
from gpu_worker_pool.server.app import create_app
from gpu_worker_pool.server.http.response import Refusal
from gpu_worker_pool.server.routes.accounting import MOST_OWNERS, PastLeases, usage_view
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.server.state_files import journal_path
from gpu_worker_pool.server.views.target import EVERYTHING
from gpu_worker_pool.testing import ServerProcess
from tests.server.leasing import eventually, queue, release, take, wait_until_free
from tests.server.past_leases import THEN, past, server_with_past

NOTHING = {
    "gpu_hours": 0.0,
    "shared_gpu_hours": 0.0,
    "leases": 0,
    "running": 0,
    "longest_hours": 0.0,
    "wait_hours": 0.0,
    "unknown_leases": 0,
    "unknown_waits": 0,
    "time_limit_ends": 0,
    "preempted_ends": 0,
    "idle_ends": 0,
    "measured_gpu_hours": 0.0,
    "busy_gpu_hours": 0.0,
}
PAST = (
    past("ada", 2, 0, 1, 4),
    past("ada", 1, 4, 4, 5),
    past("bob", 1, 0, 0.5, 2.5, memory_mb=1000),
    past(None, 1, 2, 2, 3),
    past("eve", 1, 2, 5, 3),  # the clock was set back while it was held
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_with_past(PAST) as running:
        yield running


def owners(answer: Any) -> dict[str | None, dict[str, Any]]:
    """By owner, and only what is not zero."""
    found = {
        item["owner"]: {key: value for key, value in item.items() if key != "owner" and value != NOTHING[key]}
        for item in answer["owners"]
    }
    assert len(found) == len(answer["owners"])
    return found


def test_the_past_is_added_up_by_owner(server: ServerProcess) -> None:
    answer = server.json(f"/usage?since={THEN}&until={THEN + 24 * 3600}")

    assert answer["node"] == "box"
    assert answer["source"] == "simulated"
    assert answer["since"] == "2026-03-01T00:00:00.000Z"
    assert answer["until"] == "2026-03-02T00:00:00.000Z"
    assert answer["complete_since"] is None
    assert answer["is_complete"] is True
    assert answer["others"] is None
    assert answer["server_id"] == server.json("/pool")["server_id"]
    assert owners(answer) == {
        "ada": {"gpu_hours": 7.0, "leases": 2, "longest_hours": 3.0, "wait_hours": 1.0},
        "bob": {"shared_gpu_hours": 2.0, "leases": 1, "longest_hours": 2.0, "wait_hours": 0.5},
        None: {"gpu_hours": 1.0, "leases": 1, "longest_hours": 1.0},
        "eve": {"unknown_leases": 1, "unknown_waits": 1},
    }
    assert [item["owner"] for item in answer["owners"]] == ["ada", "bob", None, "eve"]  # who used most comes first
    assert answer["total"] == {
        "gpu_hours": 8.0,
        "shared_gpu_hours": 2.0,
        "leases": 4,
        "running": 0,
        "longest_hours": 3.0,
        "wait_hours": 1.5,
        "unknown_leases": 1,
        "unknown_waits": 1,
        "time_limit_ends": 0,
        "preempted_ends": 0,
        "idle_ends": 0,
        "measured_gpu_hours": 0.0,
        "busy_gpu_hours": 0.0,
    }


@pytest.mark.parametrize(
    "query",
    [
        "since=2026-03-01T02:00:00Z&until=2026-03-01T03:00:00Z",
        "since=2026-03-01T02:00:00&until=2026-03-01%2003:00",
        "since=2026-03-01T03:00:00%2B01:00&until=2026-03-01T04:00:00+01:00",
        f"since={THEN + 7200:.0f}&until={THEN + 10800}",
    ],
)
def test_a_span_is_told_in_iso_8601_or_in_seconds(server: ServerProcess, query: str) -> None:
    found = owners(server.json(f"/usage?{query}"))
    assert {owner: usage.get("gpu_hours", 0.0) for owner, usage in found.items()} == {
        "ada": 2.0,
        "bob": 0.0,
        None: 1.0,
    }
    assert found["bob"]["shared_gpu_hours"] == 0.5


def test_what_is_held_counts_until_now_and_once_however_it_goes_on(server: ServerProcess) -> None:
    running = take(server, owner="zoe", gpus=4)["id"]
    waiter = queue(server, owner="yan")["id"]
    eventually(lambda: owners(server.json("/usage"))["yan"], "the wait is long enough to be seen")
    first = owners(server.json("/usage"))
    assert first.keys() == {"zoe", "yan"}  # the past is more than a day ago
    assert (first["zoe"]["leases"], first["zoe"]["running"]) == (1, 1)
    assert first["zoe"]["gpu_hours"] > 0
    assert first["yan"].keys() == {"wait_hours"}

    release(server, running)
    release(server, waiter)
    wait_until_free(server)
    ended = owners(server.json("/usage"))
    assert ended["zoe"].get("running", 0) == 0
    assert ended["zoe"]["leases"] == 1
    assert ended["zoe"]["gpu_hours"] >= first["zoe"]["gpu_hours"]
    assert ended["zoe"]["gpu_hours"] == pytest.approx(4 * ended["zoe"]["longest_hours"], abs=1e-5)
    assert server.json("/usage")["owners"] == server.json("/usage")["owners"]  # it grows no more

    server.restart()
    assert owners(server.json("/usage")) == ended


async def test_a_lease_that_ends_between_looking_and_reading_is_counted_once(tmp_path: Path) -> None:
    settings = ServerSettings(_env_file=None, simulated_gpus="2", gpu_pool_state_dir=str(tmp_path), gpu_pool_node="box")
    app = create_app(settings)
    loop, pool = asyncio.get_running_loop(), app.pool

    def release_meanwhile() -> SqliteAccounts:
        """In the thread that reads, when all that is live has been looked at."""
        asyncio.run_coroutine_threadsafe(pool.command(cmd.Release("a"), "ada"), loop).result()
        assert isinstance(pool.state.find("a"), EndedLease)
        return SqliteAccounts(journal_path(settings))

    async def ask(open_accounts: Callable[[], SqliteAccounts]) -> dict[str, Any]:
        answer = await PastLeases(pool, open_accounts).usage(None, None, EVERYTHING)
        (usage,) = owners(json.loads(answer)).values()
        return {key: value for key, value in usage.items() if not key.endswith("hours")}

    with pytest.raises(Refusal, match="not been opened yet") as caught:
        await ask(lambda: SqliteAccounts(journal_path(settings)))
    assert caught.value.status == 503
    async with app.running():
        await pool.request("a", Request(holder=Holder(owner="ada")), caller="ada")
        assert await ask(release_meanwhile) == {"leases": 1, "running": 1}
        assert isinstance(pool.state.find("a"), EndedLease)
        assert await ask(lambda: SqliteAccounts(journal_path(settings))) == {"leases": 1}


def test_of_very_many_owners_those_who_used_least_are_shown_as_one(tmp_path: Path) -> None:
    settings = ServerSettings(_env_file=None, simulated_gpus="2", gpu_pool_state_dir=str(tmp_path))
    pool = create_app(settings).pool
    usage: Usage = {
        f"owner-{number}": UsageTotals(36.0 * (number + 1), leases=1, longest_s=36.0 * (number + 1))
        for number in range(MOST_OWNERS + 3)
    }
    answer = asdict(usage_view(pool, EVERYTHING, usage, (THEN, None), Moment(THEN + 1e6, None)))

    assert len(answer["owners"]) == MOST_OWNERS
    assert answer["owners"][0]["owner"] == f"owner-{MOST_OWNERS + 2}"
    assert answer["owners"][-1]["owner"] == "owner-3"
    assert answer["others"] == {**NOTHING, "owners": 3, "gpu_hours": 0.06, "leases": 3, "longest_hours": 0.03}
    assert answer["total"]["leases"] == MOST_OWNERS + 3
