"""For everybody: by keyboard, by screen reader, in the dark, on a phone, and while the connection is lost."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect

from gpu_worker_pool.testing import ServerProcess
from tests.page.conftest import OpenPage, Watch
from tests.page.parts import VISITOR, connection, controls, findings, in_full, queue_of, row, timeline, too_wide
from tests.server.leasing import queue, take

PHONE: ViewportSize = {"width": 360, "height": 640}
WIDE: ViewportSize = {"width": 1280, "height": 800}
Look = tuple[ViewportSize, Literal["light", "dark"]]
LOOKS: tuple[Look, ...] = ((PHONE, "dark"), (PHONE, "light"), (WIDE, "dark"), (WIDE, "light"))

# What the focus is on, so that it can be told apart from all else; and everything it should come to, in order.
FOCUSED = "() => { const at = document.activeElement; return at === document.body ? null : nameOf(at) }"
REACHABLE = """() => [...document.querySelectorAll("a[href], button, input, select, summary, [tabindex='0']")]
    .filter((element) => element.checkVisibility({visibilityProperty: true}) && !element.disabled).map(nameOf)"""
NAME_OF = """() => {
    const words = (element) => element.getAttribute("aria-label") ?? element.textContent.trim()
    // Of a row, only what does not change while the page is open: the rest is readings and times.
    const beginning = (row) => row?.textContent.slice(0, 5) ?? ""
    window.nameOf = (element) => `${element.tagName} ${words(element)} ${beginning(element.closest("li, tr"))}`
}"""
SMALL = """() => [...document.querySelectorAll("button, select, input, nav a")]
    .map((element) => [element.textContent || element.getAttribute("placeholder"), element.getBoundingClientRect()])
    .filter(([, box]) => box.width > 0 && (box.height < 44 || box.width < 44)).map(([text]) => text)"""
TOP_OF = "(element) => element.getBoundingClientRect().top + scrollY"


@pytest.fixture(scope="module")
def server(browser: Browser) -> Iterator[ServerProcess]:
    """With something of everything: held, shared, waiting, given back, out of service, booked."""
    with ServerProcess({"SIMULATED_GPUS": "4"}) as server:
        form = {"labels": {"command": "train.py", "team": "vision"}, "ttl_s": 3600}
        take(server, None, owner="ada", worker_id="w1", among=[0], **form)
        for owner in ("bob", "eve"):
            take(server, None, owner=owner, memory_mb=2000, among=[1], **form)
        queue(server, None, owner="dan", among=[0], priority=2, **form)
        me = pwd.getpwuid(os.getuid()).pw_name
        queue(server, None, owner=me, among=[0], **form)
        released = take(server, None, owner="cyd", among=[2])
        server.ask(f"/leases/{released['id']}", "DELETE")
        assert server.ask("/admin/gpus/3/drain", "POST", None, {"reason": "a fan is broken"}).status == 200
        booked = {"gpus": 1, "among": ["2"], "starts_at": "2999-01-01", "ends_at": "2999-01-02", "owner": "ada"}
        assert server.ask("/bookings/later", "PUT", None, booked).status == 200
        yield server


def wait_until_all_is_there(page: Page) -> None:
    """What the page asks for beside the pool comes a moment later."""
    expect(row(page, 3)).to_contain_text("a fan is broken")
    expect(queue_of(page)).to_contain_text("dan")
    expect(timeline(page, 2)).to_have_attribute("aria-label", re.compile(r"cyd\W* from"))


def assert_fine(page: Page, looks: tuple[Look, ...] = LOOKS[1:3]) -> None:
    for viewport, scheme in looks:
        page.set_viewport_size(viewport)
        page.emulate_media(color_scheme=scheme)
        assert too_wide(page) == [], viewport
        assert findings(page) == [], (viewport, scheme)


def test_axe_finds_nothing_and_nobody_scrolls_sideways(open_page: OpenPage) -> None:
    page = open_page(viewport=PHONE)
    wait_until_all_is_there(page)
    assert_fine(page, LOOKS)
    page.get_by_role("button", name=re.compile("why it waits")).first.click()
    in_full(page, 0)
    # All dialogs are of one form: each in one look, and all looks in turn.
    dialogs = ("Token…", "Get a GPU", "Book…", "End the lease of .*ada", "Take out of .*dan", "Drain GPU 0…")
    for kind, look in zip(dialogs, LOOKS * 2, strict=False):
        page.get_by_role("button", name=re.compile(kind)).first.click()
        expect(page.get_by_role("dialog")).to_be_visible()
        assert_fine(page, (look,))
        page.keyboard.press("Escape")
    assert_fine(page)
    page.get_by_role("button", name="leases").click()
    expect(page.get_by_role("table", name="Leases")).to_contain_text("train.py")
    assert_fine(page)
    page.get_by_role("link", name="Usage").click()
    expect(page.get_by_role("region", name="Table of GPU-hours")).to_contain_text("ada")
    assert_fine(page)


def test_axe_finds_nothing_while_the_connection_is_lost(page: Page, watch: Watch) -> None:
    """Nothing can be pressed then that could not work, and no number keeps its colour."""
    watch.allow("ERR_FAILED")
    wait_until_all_is_there(page)
    expect(controls(page)).not_to_have_count(0)
    page.context.route("**/ui/data/pool", lambda route: route.abort())
    expect(connection(page)).to_have_text("no connection")
    expect(page.get_by_role("alert").first).to_contain_text("No connection to the server")
    expect(controls(page)).to_have_count(0)
    expect(page.get_by_role("button", name="Token…")).to_be_disabled()
    free = page.get_by_role("group", name="Show only").get_by_role("button", name="free")
    assert free.evaluate("(chip) => getComputedStyle(chip.closest('main')).filter") == "grayscale(1)"
    assert_fine(page)


def test_the_tab_key_reaches_everything_in_the_order_it_is_read(page: Page) -> None:
    wait_until_all_is_there(page)
    in_full(page, 1)
    page.evaluate(NAME_OF)
    reachable: list[str] = page.evaluate(REACHABLE)
    page.get_by_role("link", name="Skip to the GPUs").focus()
    reached = [page.evaluate(FOCUSED)]
    for _ in reachable[1:]:
        page.keyboard.press("Tab")
        reached.append(page.evaluate(FOCUSED))
    assert reached == reachable


def test_all_can_be_done_with_the_keyboard_alone(page: Page, server: ServerProcess) -> None:
    def tab_to(name: str) -> None:
        for _ in range(80):
            page.keyboard.press("Tab")
            if name in (page.evaluate(FOCUSED) or ""):
                return
        pytest.fail(f"the focus never came to {name}")

    wait_until_all_is_there(page)
    page.evaluate(NAME_OF)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the GPUs")).to_be_focused()
    expect(page.get_by_role("link", name="Skip to the GPUs")).to_be_in_viewport()
    page.keyboard.press("Enter")
    tab_to("GPU 2")
    page.keyboard.press("Enter")
    tab_to("Drain GPU 2…")
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("button", name="Drain GPU 2…")).to_be_focused()  # where one was before
    page.keyboard.press("Space")
    expect(dialog.get_by_label("Reason")).to_be_focused()
    page.keyboard.type("no need for it")
    page.keyboard.press("Enter")
    expect(row(page, 2)).to_contain_text("no need for it")
    expect(dialog).to_be_hidden()

    page.get_by_role("button", name="Put back into service").focus()
    page.keyboard.press("Enter")
    expect(dialog).to_be_visible()
    tab_to("BUTTON Put back ")
    page.keyboard.press("Enter")
    expect(row(page, 2)).to_contain_text("free")
    assert [gpu["is_out_of_service"] for gpu in server.json("/pool")["gpus"]] == [False, False, False, True]


def test_a_filter_and_an_open_gpu_are_in_the_address(page: Page) -> None:
    """A link shows a colleague the same, and a step back undoes it. The chips count what the text finds."""
    rows = page.get_by_role("row", name=re.compile(r"^GPU \d$"))
    expect(rows).to_have_count(4)
    chips = page.get_by_role("group", name="Show only").get_by_role("button")
    # In one order, whichever GPU is in which state, so that they do not change places under the pointer; they add up.
    assert [text.split() for text in chips.all_inner_texts()] == [
        ["all", "4"],
        ["free", "1"],
        ["in", "use", "2"],
        ["off", "1"],
    ]
    page.get_by_label("Find").fill("vision")
    expect(rows).to_have_count(2)
    expect(chips.first).to_have_text("all 2")
    page.get_by_label("Find").fill("nobody is called that")
    expect(page.get_by_text("No GPU matches.")).to_be_visible()
    page.get_by_label("Find").fill("train")
    page.get_by_role("button", name="in use 2").click()
    in_full(page, 1)
    page.reload()
    expect(rows).to_have_count(2)
    expect(page.get_by_label("Find")).to_have_value("train")
    expect(page.locator(".details")).to_contain_text("eve")
    page.go_back()
    expect(page.locator(".details")).to_be_hidden()


def test_on_a_phone_mine_is_first_and_targets_are_large(open_page: OpenPage) -> None:
    page = open_page(viewport=PHONE, has_touch=True, is_mobile=True)
    wait_until_all_is_there(page)
    mine = page.get_by_text(re.compile("You: 2nd of 2"))
    assert mine.evaluate(TOP_OF) < page.get_by_text("1 GPU is free").evaluate(TOP_OF) < row(page, 0).evaluate(TOP_OF)
    assert page.evaluate(SMALL) == []
    # Now is in sight: the timeline has the width of the screen.
    box = page.locator(".now").first.bounding_box()
    assert box is not None
    assert 0 < box["x"] < PHONE["width"]


def test_a_visitor_may_look_and_learns_how_to_get_a_gpu(open_page: OpenPage, watch: Watch) -> None:
    watch.allow("401")
    page = open_page(extra_http_headers=VISITOR)
    wait_until_all_is_there(page)
    expect(controls(page)).to_have_count(0)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Get a GPU").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("GPUs").fill("2")
    dialog.get_by_label("Time limit").fill("2h")
    dialog.get_by_label("Command").fill("python x.py --lr 1")
    dialog.get_by_role("button", name="Copy").click()
    expect(dialog.get_by_role("status")).to_have_text("Copied the command.")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == "gpu-pool run --gpus 2 --time 2h -- python x.py --lr 1"
