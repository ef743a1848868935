"""The questions of three seconds, on one screen: is there a GPU for me, when, who has it, what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from gpu_worker_pool.testing import ServerProcess
from tests.page.conftest import OpenPage
from tests.page.parts import happened, queue_of, row, timeline, waiters
from tests.server.leasing import queue, take

SCREEN = {"width": 1280, "height": 720}
BOTTOM = "(element) => element.getBoundingClientRect().bottom + scrollY"
OUTSIDER = {"pid": 40712, "name": "python", "user": "mallory", "memory_mb": 59_000, "utilization_percent": 64}
PLACES = "() => [...document.querySelectorAll('main *')].map((each) => Math.round(each.getBoundingClientRect().top))"
TWO_FRAMES = "() => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))"


@pytest.fixture(scope="module")
def server(browser: Browser) -> Iterator[ServerProcess]:
    """Eight GPUs, all in use in some way, and ten waiters."""
    server = ServerProcess({"SIMULATED_GPUS": "8", "REFRESH_INTERVAL": "1"})
    outsiders = server.folder / "outsiders.json"
    outsiders.write_text(json.dumps({"6": [OUTSIDER]}))
    server.env["SIMULATED_OUTSIDERS"] = str(outsiders)
    with server:
        limited: dict[str, Any] = {"time_limit_s": 5400, "ttl_s": 3600}
        take(server, owner="ada", gpus=2, among=[0, 1], labels={"command": "train.py"}, **limited)
        for gpu, owner in ((2, "bob"), (3, "carol"), (4, "dan"), (5, "erin")):
            take(server, owner=owner, among=[gpu], **limited)
        server.ask("/admin/gpus/7/drain", "POST", None, {"reason": "bad fan, RMA 4411"})
        for number in range(10):
            queue(server, f"w{number}", owner=f"user{number}", time_limit_s=600, ttl_s=3600)
        yield server


def test_eight_gpus_ten_waiters_and_the_timeline_are_on_one_screen(open_page: OpenPage) -> None:
    page = open_page(viewport=SCREEN)
    expect(waiters(page)).to_have_count(10)
    expect(row(page, 7)).to_contain_text("bad fan, RMA 4411")
    expect(timeline(page, 7)).to_be_visible()
    expect(page.get_by_role("region", name="Needs attention")).to_contain_text(
        "GPU 6 is used outside the pool: mallory"
    )
    assert page.get_by_role("region", name="Timeline").evaluate(BOTTOM) <= SCREEN["height"]
    chips = page.get_by_role("group", name="Show only").get_by_role("button")
    expect(chips).to_have_text(["all 8", "in use 6", "blocked 1", "off 1"])


def test_the_first_line_tells_when_a_request_that_is_made_now_would_start(open_page: OpenPage) -> None:
    """And the time of the first waiter stands at that waiter."""
    page = open_page(viewport=SCREEN)
    answer = page.get_by_role("region", name="Is there a GPU?")
    expect(answer).to_contain_text(re.compile(r"No GPU is free\. Ask now for 1 GPU: about \d\d:\d\d\."))
    expect(answer).to_contain_text(re.compile(r"2: ~?\d\d:\d\d · 4: "))
    expect(page.get_by_text(re.compile("^Starts (about|probably)"))).to_have_count(0)
    expect(waiters(page).first).to_contain_text(re.compile(r"user0.*\d\d:\d\d"))
    page.get_by_role("button", name="Get a GPU").click()
    expect(page.get_by_role("dialog")).to_contain_text(re.compile(r"Ask now: A100 80GB ~?\d\d:\d\d"))


def test_nothing_jumps_after_another_shape_is_chosen(open_page: OpenPage) -> None:
    page = open_page(viewport=SCREEN)
    expect(waiters(page)).to_have_count(10)
    page.get_by_role("button", name="leases").click()
    page.evaluate(TWO_FRAMES)
    at_once = page.evaluate(PLACES)
    with page.expect_response("**/ui/data/pool"):
        pass
    page.evaluate(TWO_FRAMES)
    assert page.evaluate(PLACES) == at_once
    expect(page.get_by_role("table", name="Leases").get_by_role("row")).to_have_count(6)


@pytest.mark.parametrize("now", ["2026-11-17T23:08:00Z", "2026-11-18T00:08:00Z"])
def test_around_midnight_times_stay_short(page: Page, server: ServerProcess, now: str) -> None:
    """An end in two hours is a time of day, and an event of ten minutes ago takes one line."""
    answer, at = server.json("/ui/data/pool"), datetime.fromisoformat(now)
    answer["now"] = now
    for lease in answer["pool"]["leases"]:
        lease |= {"granted_at": _iso(at, -600), "ends_at": _iso(at, 7200)}
    for event in answer["happened"]:
        event["at"] = _iso(at, -600)
    page.route("**/ui/data/pool", lambda route: route.fulfill(json=answer))
    page.reload()
    expect(row(page, 2)).to_contain_text(re.compile(r"1\sh 59\smin \(0[12]:08\)|2\sh \(0[12]:08\)"))
    events = happened(page).get_by_role("listitem")
    expect(events.first).to_contain_text(re.compile("^2[23]:58"))
    heights = events.evaluate_all("(all) => all.map((each) => each.querySelector('time').offsetHeight)")
    assert max(heights) <= 24


def _iso(at: datetime, in_s: float) -> str:
    return (at + timedelta(seconds=in_s)).astimezone(UTC).isoformat()


def test_a_long_list_of_events_can_be_scrolled_by_keyboard(page: Page) -> None:
    events = happened(page).get_by_role("list")
    expect(events.get_by_role("listitem")).not_to_have_count(0)
    expect(events).to_have_attribute("tabindex", "0")


def test_what_the_queue_waits_for_is_told_once(page: Page) -> None:
    expect(queue_of(page)).to_contain_text(re.compile("All wait for: 6 leased by .*ada"))
    expect(waiters(page).first).not_to_contain_text("leased by")
    expect(waiters(page).first).not_to_contain_text("Position")
    waiters(page).first.get_by_role("button", name="why it waits").click()
    expect(waiters(page).first).to_contain_text("leased by")
