"""The terms of leases, expected starts, bookings, planned drains and quotas on the page."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from gpu_worker_pool.testing import ServerProcess
from tests.page.conftest import OpenPage
from tests.page.parts import card, happened, queue_of, too_wide, use_token
from tests.server.leasing import queue, release_all, take

ADMIN = "the-admins-token"
AS_ADMIN = {"Authorization": f"Bearer {ADMIN}"}


@pytest.fixture(scope="module")
def running(browser: Browser) -> Iterator[ServerProcess]:
    settings = {"SIMULATED_GPUS": "2xA100-80GB,1xT4", "GPU_POOL_PREEMPT_GRACE": "600", "GPU_POOL_RESERVE_AFTER": "0"}
    with ServerProcess({**settings, "GPU_POOL_TOKENS": f"admin:{ADMIN}"}) as server:
        yield server


@pytest.fixture
def server(running: ServerProcess) -> Iterator[ServerProcess]:
    yield running
    for kind, name in (("quotas", "owner"), ("bookings", "id")):
        for plan in running.json(f"/{kind}")[kind]:
            running.ask(f"/{kind}/{plan[name]}", "DELETE", AS_ADMIN)
    release_all(running, AS_ADMIN)


def test_terms_a_warning_and_an_expected_start_are_shown(page: Page, server: ServerProcess) -> None:
    carol = take(server, owner="carol", model="T4", time_limit_s=7200, labels={"command": "train.py"})
    idle = take(server, owner="dave", model="A100", gpus=2, preemptible=True)
    expect(card(page, carol)).to_contain_text(re.compile(r"ends (\w+,? \d+ \w+, )?\d\d:\d\d"))
    expect(card(page, idle)).to_contain_text("preemptible")

    queue(server, owner="erin", model="T4", time_limit_s=600)
    expect(queue_of(page).get_by_role("listitem")).to_contain_text("for 10\u00a0min")
    expect(queue_of(page)).to_contain_text(re.compile("Starts probably at .*, if carol's job ends when it said"))
    expect(card(page, carol)).to_contain_text("reserved for erin, probably at")

    queue(server, owner="frank", model="A100")
    expect(card(page, idle)).to_contain_text(re.compile(r"ends in \d+\smin: preempted"))
    expect(happened(page)).to_contain_text("dave is about to lose GPU 0 and GPU 1: preempted")
    assert too_wide(page) == []


def test_bookings_and_planned_drains_are_shown_and_a_drain_can_be_cancelled(
    open_page: OpenPage, server: ServerProcess
) -> None:
    page, day = open_page(), time.time() + 86_400
    booked = {"starts_at": str(day), "ends_at": str(day + 7200), "model": "T4", "owner": "ada", "reason": "a <b>course"}
    assert server.ask("/bookings/course", "PUT", AS_ADMIN, booked).status == 200
    drained = server.ask("/admin/gpus/0/drain", "POST", AS_ADMIN, {"at": str(day), "reason": "new fans"})
    assert drained.status == 200
    plans = card(page, 2).get_by_role("list", name="Plans")
    expect(plans).to_have_text(re.compile("booked for ada from .* until .*: a <b>course"))
    expect(card(page, 0).get_by_role("list", name="Plans")).to_have_text(
        re.compile("out of service from .* on: new fans")
    )

    use_token(page, ADMIN)
    card(page, 0).get_by_role("button", name="Cancel planned drain").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel the drain").click()
    expect(card(page, 0).get_by_role("list", name="Plans")).to_be_hidden()
    expect(card(page, 0).get_by_role("button", name="Drain GPU 0")).to_be_visible()
    assert [booking["id"] for booking in server.json("/bookings")["bookings"]] == ["course"]


def test_quotas_are_shown_once_there_are_some(open_page: OpenPage, server: ServerProcess) -> None:
    page = open_page()
    expect(card(page, 0)).to_be_visible()
    section = page.get_by_role("region", name="Quotas").first
    expect(section).to_be_hidden()

    take(server, owner="ada", gpus=2)
    server.ask("/quotas/ada", "PUT", AS_ADMIN, {"gpus": 4})
    server.ask("/quotas/*", "PUT", AS_ADMIN, {"gpus": 1})
    page.reload()
    # The table of usage has a row for this owner, too.
    expect(page.get_by_role("row").filter(has_text=re.compile("ada24"))).to_be_visible()
    expect(page.get_by_role("row", name=re.compile("^all others"))).to_be_visible()
