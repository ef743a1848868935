"""Times to come: terms of leases, expected starts, bookings by dragging and by keyboard, planned drains, quotas."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from gpu_worker_pool.testing import ServerProcess
from tests.page.conftest import OpenPage, Watch
from tests.page.parts import confirm, happened, in_full, queue_of, row, timeline, too_wide, waiters
from tests.server.leasing import eventually, queue, release_all, take


@pytest.fixture(scope="module")
def running(browser: Browser) -> Iterator[ServerProcess]:
    settings = {"SIMULATED_GPUS": "2xA100-80GB,1xT4", "GPU_POOL_PREEMPT_GRACE": "600", "GPU_POOL_RESERVE_AFTER": "0"}
    with ServerProcess(settings) as server:
        yield server


@pytest.fixture
def server(running: ServerProcess) -> Iterator[ServerProcess]:
    yield running
    for kind, name in (("quotas", "owner"), ("bookings", "id")):
        for plan in running.json(f"/{kind}")[kind]:
            running.ask(f"/{kind}/{plan[name]}", "DELETE")
    release_all(running)


def test_terms_a_warning_and_an_expected_start_are_shown(page: Page, server: ServerProcess) -> None:
    carol = take(server, owner="carol", model="T4", time_limit_s=7200, labels={"command": "train.py"})
    idle = take(server, owner="dave", model="A100", gpus=2, preemptible=True)
    expect(row(page, carol)).to_contain_text(re.compile(r"1\sh 59\smin \(\d\d:\d\d\)"))
    expect(timeline(page, 2)).to_have_attribute(
        "aria-label", re.compile(r"carol\W* \(\W*train.py\W*\) since .*, until")
    )
    expect(in_full(page, idle)).to_contain_text("preemptible")
    expect(row(page, 1)).to_contain_text("same lease")

    queue(server, owner="erin", model="T4", time_limit_s=600)
    expect(waiters(page)).to_contain_text(re.compile(r"erin.*1 GPU, T4, 10\smin.*\d\d:\d\d"))
    why = waiters(page).get_by_title("if carol's job ends when it said")
    expect(why).to_have_text(re.compile(r"^\d\d:\d\d$"))
    expect(timeline(page, 2)).to_have_attribute("aria-label", re.compile("kept for .*erin"))

    queue(server, owner="frank", model="A100")
    expect(row(page, idle)).to_contain_text(re.compile(r"\d+\smin: preempted"))
    assert too_wide(page) == []
    expect(happened(page)).to_contain_text("dave is about to lose GPU 0 and 1: preempted")


def test_dragging_over_free_future_books_it_and_the_booking_can_be_cancelled(page: Page, server: ServerProcess) -> None:
    track = timeline(page, 0).locator(".track")
    expect(page.get_by_text("Drag over free future to book it.")).to_be_visible()
    box, last = track.bounding_box(), timeline(page, 1).locator(".track").bounding_box()
    assert box is not None
    assert last is not None
    # Past is the left half of twelve hours: from three hours ahead to four hours ahead, over two GPUs.
    page.mouse.move(box["x"] + box["width"] * 9 / 12, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(last["x"] + last["width"] * 10 / 12, last["y"] + last["height"] / 2, steps=5)
    page.mouse.up()
    dialog = page.get_by_role("dialog", name="Book GPU 0 and 1?")
    expect(dialog).to_be_visible()
    confirm(page, "Book", Reason="a <b>course", For="ada")
    (booking,) = server.json("/bookings")["bookings"]
    assert [gpu["gpu_id"] for gpu in booking["gpus"]] == [0, 1]
    assert (booking["owner"], booking["reason"]) == ("ada", "a <b>course")
    ahead_s = [_seconds(booking[name]) - time.time() for name in ("starts_at", "ends_at")]
    assert 2.6 * 3600 < ahead_s[0] < 3.1 * 3600
    assert 3.9 * 3600 < ahead_s[1] < 4.4 * 3600
    assert _seconds(booking["starts_at"]) % 900 == 0

    expect(row(page, 0)).to_contain_text(re.compile("booked for .*ada.* from .* to .*: .*a <b>course"))
    timeline(page, 0).get_by_role("button", name=re.compile("^Cancel: booked for")).click()
    confirm(page, "Cancel the booking")
    assert server.json("/bookings")["bookings"] == []

    # The past cannot be booked.
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 3, box["y"] + box["height"] / 2)
    page.mouse.up()
    expect(page.get_by_role("dialog")).to_be_hidden()


def _seconds(iso: str) -> float:
    return time.mktime(time.strptime(iso[:19], "%Y-%m-%dT%H:%M:%S")) - time.timezone


def test_booking_by_keyboard_and_what_the_server_refuses(page: Page, server: ServerProcess, watch: Watch) -> None:
    watch.allow("422")
    expect(row(page, 0)).to_be_visible()
    page.get_by_role("button", name="Book…").press("Enter")
    dialog = page.get_by_role("dialog", name="Book GPUs?")
    expect(dialog.get_by_label("How many")).to_be_focused()
    page.keyboard.type("3")
    dialog.get_by_label("Model").select_option(label="T4")
    page.keyboard.press("Enter")
    dialog.get_by_role("button", name="Book").press("Enter")
    expect(dialog.get_by_role("alert")).to_contain_text("cannot be booked")
    dialog.get_by_label("How many").fill("1")
    dialog.get_by_role("button", name="Book").press("Enter")
    expect(dialog).to_be_hidden()
    expect(row(page, 2)).to_contain_text("booked for")


def test_a_drain_is_planned_shown_and_cancelled(open_page: OpenPage, server: ServerProcess) -> None:
    page, day = open_page(), time.strftime("%Y-%m-%dT%H:%M", time.gmtime(time.time() + 86_400))
    in_full(page, 0).get_by_role("button", name="Drain GPU 0").click()
    confirm(page, "Drain", Reason="new fans", From=day)
    expect(row(page, 0)).to_contain_text(re.compile("drains .*new fans"))
    (booking,) = server.json("/bookings")["bookings"]
    assert (booking["owner"], booking["starts_at"][:16]) == (None, day)
    page.locator(".details").get_by_role("button", name="Cancel planned drain").click()
    confirm(page, "Cancel the drain")
    expect(page.locator(".details").get_by_role("button", name="Drain GPU 0…")).to_be_visible()
    assert server.json("/bookings")["bookings"] == []


def test_quotas_are_shown_once_there_are_some(open_page: OpenPage, server: ServerProcess) -> None:
    page = open_page("/ui#usage")
    expect(page.get_by_role("region", name="What happened last")).to_be_visible()
    section = page.get_by_role("region", name="Quotas", exact=True)
    expect(section).to_be_hidden()
    take(server, owner="ada", gpus=2)
    server.ask("/quotas/ada", "PUT", None, {"gpus": 4})
    server.ask("/quotas/*", "PUT", None, {"gpus": 1})
    page.reload()
    expect(section.get_by_role("row", name=re.compile("^ada 2 4"))).to_be_visible()
    expect(section.get_by_role("row", name=re.compile("^all others"))).to_be_visible()


def test_equal_requests_of_one_owner_are_one_row(page: Page, server: ServerProcess) -> None:
    take(server, owner="carol", model="T4", time_limit_s=7200)
    ids = [queue(server, owner="erin", model="T4", labels={"command": "sweep.py"})["id"] for _ in range(3)]
    expect(waiters(page)).to_have_count(1)
    expect(waiters(page)).to_contain_text("sweep.py \u00d73")
    expect(queue_of(page)).to_contain_text("Queue 3")
    waiters(page).get_by_role("button", name="Take out").click()
    confirm(page, "Take out")
    eventually(lambda: server.json("/pool")["queue"] == [], "all are out")
    assert {server.json(f"/leases/{lease_id}")["end_reason"] for lease_id in ids} == {"cancelled"}
