"""Many GPUs, a square for each: of one box, and of a fleet by model on one screen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page, Route, ViewportSize, expect

from gpu_worker_pool.testing import ServerProcess
from tests.page.conftest import OpenPage
from tests.page.fleet_answer import FleetAnswer
from tests.page.parts import confirm, connection, findings, queue_of, too_wide, waiters
from tests.server.leasing import queue, release, take

GPUS = 200
LAPTOP: ViewportSize = {"width": 1280, "height": 720}
PHONE: ViewportSize = {"width": 360, "height": 640}
MODELS = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "NVIDIA GeForce RTX 4090")
BOTTOM = "(element) => element.getBoundingClientRect().bottom + scrollY"
# Frames of half a second, and tasks that were too long for one.
WATCH_FRAMES = """() => new Promise((resolve) => {
    const long = []
    new PerformanceObserver((list) => long.push(...list.getEntries().map((each) => each.duration))).observe({ type: "longtask" })
    const began = performance.now()
    let frames = 0
    const frame = (now) => {
        frames += 1
        window.scrollBy(0, frames % 2 ? 5 : -5)
        if (now - began < 500) requestAnimationFrame(frame)
        else resolve({ perSecond: frames / ((now - began) / 1000), long })
    }
    requestAnimationFrame(frame)
})"""
SHIFTS = """() => new Promise((resolve) => {
    let sum = 0
    new PerformanceObserver((list) => { for (const each of list.getEntries()) sum += each.value }).observe({ type: "layout-shift", buffered: true })
    setTimeout(() => resolve(sum), 500)
})"""


@pytest.fixture(scope="module")
def server(browser: Browser) -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": str(GPUS), "REFRESH_INTERVAL": "1"}) as server:
        take(server, "ada-1", owner="ada", among=[0], time_limit_s=36_000, labels={"command": "train.py"}, ttl_s=3600)
        take(server, "bob-1", owner="bob", among=[1], gpus=1, ttl_s=3600)
        for number in range(14):
            queue(server, f"waits-{number}", owner=f"dan{number}", among=[0], ttl_s=3600)
        yield server


def test_two_hundred_gpus_stay_smooth_while_they_change(
    open_page: OpenPage, server: ServerProcess, record_property: Callable[[str, object], None]
) -> None:
    page = open_page(viewport=LAPTOP)
    expect(page.locator(".square")).to_have_count(GPUS)
    expect(page.get_by_role("button", name=re.compile("^GPU 0, in use, ada, .* left"))).to_be_visible()
    assert page.evaluate(SHIFTS) < 0.1
    for turn in range(3):
        take(server, f"late-{turn}", owner=f"late{turn}", gpus=40, among=list(range(40, 80)), ttl_s=3600)
        expect(page.get_by_role("button", name="in use 42")).to_be_visible()
        release(server, f"late-{turn}")
        expect(page.get_by_role("button", name="in use 2")).to_be_visible()
    seen = page.evaluate(WATCH_FRAMES)
    record_property("measured", f"{GPUS} GPUs: {seen['perSecond']:.0f} frames a second, long tasks {seen['long']}")
    assert page.locator(".squares").evaluate(BOTTOM) < LAPTOP["height"]
    for viewport in (LAPTOP, PHONE):
        page.set_viewport_size(viewport)
        assert too_wide(page) == []
    assert findings(page) == []
    sizes = page.locator(".square").first.evaluate("(square) => [square.offsetWidth, square.offsetHeight]")
    assert min(sizes) >= 44, "on a phone"


def test_one_gpu_is_shown_in_full_by_mouse_and_by_keyboard(page: Page) -> None:
    details = page.get_by_role("region", name="One GPU")
    ada = page.get_by_role("button", name=re.compile("^GPU 0, in use, ada"))
    ada.click()
    expect(details).to_contain_text("train.py")
    expect(ada).to_have_attribute("aria-expanded", "true")
    details.get_by_role("button", name="Close").click()
    expect(details).to_be_hidden()

    ada.focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("button", name=re.compile("^GPU 1, .*bob"))).to_be_focused()
    page.keyboard.press("Enter")
    expect(details).to_contain_text("bob")
    page.keyboard.press("End")
    expect(page.get_by_role("button", name=re.compile(f"^GPU {GPUS - 1}, "))).to_be_focused()
    page.keyboard.press("ArrowDown")  # an edge
    expect(page.get_by_role("button", name=re.compile(f"^GPU {GPUS - 1}, "))).to_be_focused()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    expect(ada).to_be_focused()
    page.get_by_role("button", name="timeline", exact=True).click()
    expect(page.get_by_role("region", name="Timeline")).to_contain_text("136 more GPUs are not shown")
    page.get_by_role("button", name="leases", exact=True).click()
    expect(page.get_by_role("table", name="Leases").get_by_role("row")).to_have_count(3)


def test_of_a_long_queue_the_first_are_shown_until_all_are_asked_for(page: Page) -> None:
    expect(waiters(page)).to_have_count(12)
    queue_of(page).get_by_role("button", name="Show all 14").click()
    expect(waiters(page)).to_have_count(14)


def big_fleet() -> FleetAnswer:
    fleet = FleetAnswer(50)
    for number, name in enumerate(fleet.names):
        for index in range(8):
            fleet.gpu(name, index)["name"] = MODELS[number % 4]
    fleet.box("gpu-17").update(state="unknown", heard_ago_s=240.0)
    fleet.view["forecast"] = {
        "models": [{"model": model, "starts": [_start(fleet, 1), _start(fleet, 8)]} for model in MODELS]
    }
    return fleet


def _start(fleet: FleetAnswer, gpus: int) -> dict[str, object]:
    return {"gpus": gpus, "at": fleet.time(0 if gpus == 1 else 7200), "basis": "predicted"}


def test_fifty_boxes_by_model_are_on_one_screen(open_page: OpenPage) -> None:
    page, fleet = open_page(viewport=LAPTOP), big_fleet()
    fleet.serve(page.context)
    page.reload()
    expect(page.get_by_role("heading", level=1)).to_have_text("Fleet of 50 boxes")
    expect(page.locator(".square")).to_have_count(400)
    assert page.locator(".squares").evaluate(BOTTOM) <= LAPTOP["height"]
    row = page.get_by_role("row", name=re.compile("^L40S"))
    expect(row).to_have_text(re.compile(r"L40S2472.now~\d\d:\d\d"))
    expect(page.get_by_role("region", name="Needs attention")).to_contain_text(
        "gpu-17 is silent for 4\u00a0min: 8 GPUs unknown"
    )
    row.get_by_role("button").click()
    expect(page.locator(".square")).to_have_count(96)
    page.go_back()
    assert findings(page) == []
    for viewport in (PHONE, LAPTOP):
        page.set_viewport_size(viewport)
        assert too_wide(page) == []


def test_a_fleet_is_shown_by_box_and_a_gang_is_one_lease(open_page: OpenPage) -> None:
    page, fleet = open_page(), FleetAnswer(6)
    page.add_init_script("delete Map.groupBy; delete Object.groupBy")  # as in a browser of two years ago
    fleet.lease_on("gpu-1", 0)["idle_s"] = 2700
    fleet.lease_on("gpu-1", 3)["warning"] = {"reason": "preempted", "ends_at": fleet.time(3000)}
    fleet.serve(page.context)
    page.reload()
    expect(connection(page)).to_have_text("live")
    expect(page.locator(".box").filter(has_text="gpu-1")).to_contain_text("leads")
    expect(page.get_by_role("button", name=re.compile("^GPU 0 of .*gpu-1.*idle for 45"))).to_be_visible()
    expect(page.get_by_role("button", name=re.compile("^GPU 3 of .*gpu-1.*min: preempted left"))).to_be_visible()
    attention = page.get_by_role("region", name="Needs attention")
    expect(attention).to_contain_text("user0 computes nothing since 45\u00a0min")
    # With a filter a box still says what it has.
    page.get_by_label("Find").fill("user0")
    expect(page.locator(".square")).to_have_count(6)
    expect(page.locator(".box").first).to_contain_text("2 free")
    page.get_by_label("Find").fill("")

    # The leader is replaced, and its box is not heard of.
    fleet.lead("gpu-3")
    fleet.box("gpu-1").update(state="unknown", heard_ago_s=14.0, version="1.2.2")
    fleet.box("gpu-4").update(version="1.2.4")
    expect(page.locator(".box").filter(has_text="gpu-3")).to_contain_text("leads")
    expect(attention).to_contain_text(re.compile(r"gpu-1 is silent for \d+\ss: 8 GPUs unknown, its leases go on"))
    expect(attention).to_contain_text("gpu-4 has version 1.2.4, the leader 1.2.3")
    expect(page.get_by_role("button", name=re.compile("GPU 0 of .*gpu-1.*, unknown, user0"))).to_have_text("?")

    fleet.join("gang", [("gpu-2", 2), ("gpu-4", 2), ("gpu-4", 5)], owner="ann")
    page.get_by_role("button", name=re.compile("^GPU 2 of .*gpu-4.*ann, one lease over 2 boxes")).click()
    details = page.get_by_role("region", name="One GPU")
    expect(details).to_contain_text("one lease over 2 boxes: GPU 2 of gpu-2; GPU 2 and 5 of gpu-4")

    # Its title names the box once, and its parts fill the width: there is no third column with a rule of its own.
    title = details.get_by_role("heading", level=2)
    expect(title).to_contain_text("GPU 2 of gpu-4")
    assert title.inner_text().count("gpu-4") == 1
    parts = [part.bounding_box() for part in details.locator(".details > div").all()]
    assert [part["y"] for part in parts if part] == [parts[0]["y"]] * 2 if parts[0] else False
    room = details.locator(".details").bounding_box()
    assert room is not None
    assert sum(part["width"] for part in parts if part) > 0.9 * room["width"]
    assert details.locator("hr").count() == 0

    # What is done to it is done by the calls of the fleet.
    asked: list[str] = []

    def note(route: Route) -> None:
        asked.append(route.request.url)
        route.fulfill(json={"end_reason": "revoked"})

    page.route("**/fleet/admin/**", note)
    details.get_by_role("button", name="Drain GPU 2…").click()
    confirm(page, "Drain")
    details.get_by_role("button", name="End the lease of").click()
    confirm(page, "End the lease")
    paths = [url.partition("/fleet/")[2] for url in asked]
    assert paths == ["admin/gpus/gpu-4%3AGPU-gpu-4-2/drain", "admin/leases/gang/revoke"]
