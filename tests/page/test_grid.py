"""Many GPUs, as a grid of tiles: of one box, of a fleet, of more boxes than anybody sees at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from gpu_worker_pool.testing import ServerProcess
from tests.page.axe import serious_findings
from tests.page.conftest import OpenPage
from tests.page.fleet_answer import FleetAnswer
from tests.page.parts import connection, controls, queue_of, too_wide, use_token
from tests.server.leasing import queue, take

ADMIN = "the-token-of-admin"
GPUS = 200
LAPTOPS = ((1366, 768), (1440, 900))
BOTTOM = "() => document.getElementById('grid').getBoundingClientRect().bottom + scrollY"
COUNT_LONG_TASKS = """() => {
    window.longTasks = []
    const note = (list) => window.longTasks.push(...list.getEntries().map((each) => each.duration))
    const observer = new PerformanceObserver(note)
    observer.observe({ type: "longtask" })
}"""


@pytest.fixture(scope="module")
def server(browser: Browser) -> Iterator[ServerProcess]:
    env = {"SIMULATED_GPUS": str(GPUS), "GPU_POOL_TOKENS": f"admin:{ADMIN}", "REFRESH_INTERVAL": "1"}
    with ServerProcess(env) as server:
        take(server, "ada-1", owner="ada", among=[0], time_limit_s=36_000, labels={"command": "train.py"}, ttl_s=3600)
        take(server, "bob-1", owner="bob", among=[1], gpus=1, ttl_s=3600)
        for number in range(5):
            queue(server, f"waits-{number}", owner="ada" if number == 4 else "dan", among=[0], ttl_s=3600)
        yield server


def test_two_hundred_gpus_fit_on_two_screens_of_a_laptop(open_page: OpenPage) -> None:
    width, height = LAPTOPS[0]
    page = open_page(viewport={"width": width, "height": height})
    expect(page.get_by_role("button", name=re.compile("GPU 0 of .*, leased, ada, until .*"))).to_contain_text("to ")
    fleet = FleetAnswer(GPUS // 8)
    fleet.view["pool"] |= {"queue_length": 3, "queue": [_waiter(fleet, number) for number in range(3)]}
    for is_fleet in (False, True):
        if is_fleet:
            fleet.serve(page.context)
            # Only what is seen is drawn, and on a small screen the boxes are below what is seen.
            page.set_viewport_size({"width": width, "height": height})
            page.reload()
            expect(page.get_by_role("heading", level=3, name="gpu-2", exact=True)).to_be_visible()
        for width, height in LAPTOPS:
            page.set_viewport_size({"width": width, "height": height})
            assert page.evaluate(BOTTOM) < 2 * height, (is_fleet, width)
            assert too_wide(page) == []
        for scheme in ("dark", "light"):
            page.emulate_media(color_scheme=scheme)
            assert serious_findings(page) == [], (is_fleet, scheme)
        page.set_viewport_size({"width": 360, "height": 640})
        assert too_wide(page) == []


def _waiter(fleet: FleetAnswer, number: int) -> dict[str, object]:
    waiter = {"id": f"w{number}", "state": "queued", "owner": f"waiter{number}", "position": number + 1}
    start = {"expected_start_at": fleet.time(600), "expected_start_basis": "declared", "expected_after": "user0 (a.py)"}
    return {**waiter, "reason": "Position 1 of 3, waiting for 4 GPUs", "requested_at": fleet.time(-60), **start}


def test_one_gpu_is_shown_in_full_by_mouse_and_by_keyboard(page: Page, server: ServerProcess) -> None:
    details = page.get_by_role("region", name=server.json("/pool")["node"])
    ada = page.get_by_role("button", name=re.compile("GPU 0 of .*, leased, ada"))
    ada.click()
    expect(details).to_contain_text("train.py")
    expect(ada).to_have_attribute("aria-expanded", "true")
    details.get_by_role("button", name="Close").click()
    expect(details).to_be_hidden()
    expect(ada).to_be_focused()

    page.keyboard.press("ArrowRight")
    bob = page.get_by_role("button", name=re.compile("GPU 1 of .*, bob"))
    expect(bob).to_be_focused()
    page.keyboard.press("Enter")
    expect(details.get_by_role("strong")).to_have_text("bob")
    page.keyboard.press("ArrowLeft")  # the details follow
    expect(details.get_by_role("strong")).to_have_text("ada")
    page.keyboard.press("Tab")
    expect(details.get_by_role("button", name="Close")).to_be_focused()
    page.keyboard.press("Escape")
    expect(details).to_be_hidden()
    expect(ada).to_be_focused()
    page.keyboard.press("End")
    expect(page.get_by_role("button", name=re.compile(f"GPU {GPUS - 1} of "))).to_be_in_viewport()
    page.keyboard.press("ArrowDown")  # an edge
    expect(page.get_by_role("button", name=re.compile(f"GPU {GPUS - 1} of "))).to_be_focused()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    expect(ada).to_be_focused()

    use_token(page, ADMIN)
    bob.click()
    expect(controls(details.page)).not_to_have_count(0)
    details.get_by_role("button", name=re.compile("^Drain")).click()
    page.get_by_label("Reason").fill("a bad fan")
    page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    expect(details).to_contain_text("bad fan")


def test_what_is_mine_and_how_the_gpus_are_shown_is_remembered(page: Page) -> None:
    expect(queue_of(page).get_by_role("listitem")).to_have_count(3)
    page.get_by_role("button", name="Which are mine?").click()
    page.get_by_role("textbox", name="Owner").fill("ada")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name=re.compile("ada, yours"))).to_be_visible()
    expect(page.locator("[data-stat=mine]")).to_contain_text("1of ada, 1 waiting (position 5)")
    expect(queue_of(page).get_by_role("listitem")).to_have_count(4)  # the first, and one's own
    queue_of(page).get_by_role("button", name="Show all 5").click()
    expect(queue_of(page).get_by_role("listitem")).to_have_count(5)

    page.reload()
    page.get_by_role("button", name="mine 1").click()
    expect(page.locator(".tile")).to_have_count(1)
    page.get_by_role("button", name="Cards").click()
    expect(page.get_by_role("heading", level=4)).to_have_text([re.compile("GPU 0 ")])
    page.reload()
    expect(page.locator("main h4")).to_have_count(GPUS)
    page.get_by_role("button", name="Grid").click()
    expect(page.locator("main h4")).to_have_count(0)


def test_a_fleet_is_shown_by_box_with_its_leader_and_what_is_unknown(open_page: OpenPage) -> None:
    page, fleet = open_page(), FleetAnswer(4)
    fleet.lease_on("gpu-1", 0)["idle_s"] = 2700
    fleet.lease_on("gpu-1", 1)["ends_at"] = fleet.time(40 * 86_400)
    fleet.lease_on("gpu-1", 3)["warning"] = {"reason": "preempted", "ends_at": fleet.time(3000)}
    fleet.view["pool"] |= {"queue_length": 1, "queue": [_waiter(fleet, 0)]}
    fleet.serve(page.context)
    page.reload()
    expect(connection(page)).to_have_text("live")
    about = page.get_by_role("list", name="The fleet")
    expect(about).to_contain_text("Fleet of 4 boxesleader gpu-1epoch 7this server is 0.4\u00a0s behind")
    expect(page.locator(".node-head").filter(has_text="gpu-1")).to_contain_text("leader")
    expect(page.get_by_role("button", name=re.compile("GPU 0 of gpu-1, .*idle for 45"))).to_contain_text("idle")
    expect(page.get_by_role("button", name=re.compile("GPU 1 of gpu-1, .*until "))).to_contain_text("to ")
    expect(page.get_by_role("button", name=re.compile("GPU 3 of gpu-1, .*ends in "))).to_contain_text("min")
    expect(queue_of(page)).to_contain_text(re.compile("Starts probably at .*, if user0's job ends when it said"))

    # The leader is replaced, and its box is not heard of.
    fleet.lead("gpu-3")
    fleet.box("gpu-1").update(state="unknown", heard_ago_s=14.0, version="1.2.2")
    fleet.box("gpu-4").update(version="1.2.4")
    expect(about).to_contain_text("leader gpu-3epoch 8")
    expect(about).to_contain_text("1 box unknown: gpu-1")
    head = page.locator(".node-head").filter(has_text="gpu-1")
    expect(head).to_contain_text(re.compile("unknown.*silent for .*; its leases go on, nothing is granted there"))
    expect(page.get_by_role("button", name="GPU 0 of gpu-1, unknown, user0")).to_contain_text("user0")
    expect(page.locator(".node-head").filter(has_text="gpu-3")).to_contain_text("leader")
    expect(page.locator(".node-head").get_by_text("version")).to_have_text([re.compile("GPUs, version 1.2.4$")])

    # A gang is one lease: to open one of its GPUs marks the others.
    fleet.join("gang", [("gpu-2", 2), ("gpu-4", 2), ("gpu-4", 5)], owner="ann")
    one = page.get_by_role("button", name=re.compile("GPU 2 of gpu-4, .*ann, one lease over 2 boxes"))
    one.click()
    expect(page.locator("#details")).to_contain_text("one lease over 2 boxes: GPU 2 of gpu-2; GPU 2 and GPU 5 of gpu-4")
    expect(page.locator(".tile[data-together]")).to_have_count(2)

    # What is done to it is done by the calls of the fleet.
    asked: list[str] = []

    def note(route: Route) -> None:
        asked.append(route.request.url)
        route.fulfill(json={"end_reason": "revoked"})

    page.route("**/fleet/admin/**", note)
    use_token(page, ADMIN)
    for name in ("Drain", "Revoke"):
        page.locator("#details").get_by_role("button", name=re.compile(f"^{name}")).click()
        page.get_by_role("dialog").get_by_role("button", name=name).click()
        expect(page.get_by_role("dialog")).to_be_hidden()
    paths = [url.partition("/fleet/")[2] for url in asked]
    assert paths == ["admin/gpus/gpu-4%3AGPU-gpu-4-2/drain", "admin/leases/gang/revoke"]


def test_of_ten_thousand_gpus_only_what_is_seen_is_drawn(
    open_page: OpenPage, record_property: Callable[[str, object], None]
) -> None:
    boxes, page = 1250, open_page(viewport={"width": 1366, "height": 768})
    fleet = FleetAnswer(boxes)
    fleet.serve(page.context)
    page.reload()
    expect(page.get_by_role("button", name="all 10000")).to_be_visible()
    page.evaluate(COUNT_LONG_TASKS)
    counts = []
    for part in (0.0, 0.3, 0.6, 1.0):
        page.evaluate("(part) => scrollTo(0, part * document.getElementById('grid').scrollHeight)", part)
        box = max(1, round(part * boxes))
        expect(page.locator(".node-head h3").get_by_text(f"gpu-{box}", exact=True)).to_be_attached()
        counts.append(page.evaluate("document.querySelectorAll('*').length"))
        assert page.locator(".tile").count() < 500
    assert max(counts) < 5000
    page.locator(".tile").last.focus()
    page.keyboard.press("Control+Home")
    expect(page.get_by_role("button", name=re.compile("GPU 0 of gpu-1, "))).to_be_focused()
    expect(page.get_by_role("button", name=re.compile("GPU 0 of gpu-1, "))).to_be_in_viewport()
    page.get_by_label("Find").fill("gpu-1250")
    expect(page.locator(".tile")).to_have_count(8)
    tasks = page.evaluate("window.longTasks")
    longest = max(tasks, default=0)
    record_property(
        "measured", f"10,000 GPUs: {max(counts)} elements, {len(tasks)} long tasks, longest {longest:.0f} ms"
    )
