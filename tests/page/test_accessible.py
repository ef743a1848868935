"""For everybody: by keyboard, by screen reader, in the dark, on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect

from gpu_worker_pool.testing import ServerProcess
from tests.page.axe import serious_findings
from tests.page.conftest import OpenPage
from tests.page.parts import card, controls, happened, queue_of, too_wide, use_token
from tests.server.leasing import queue, take

ADMIN = "the-token-of-admin"
PHONE: ViewportSize = {"width": 360, "height": 640}
WIDE: ViewportSize = {"width": 1280, "height": 800}
Scheme = Literal["light", "dark"]

# What the focus is on, so that it can be told apart from all else; and everything it should come to, in order.
FOCUSED = "() => { const at = document.activeElement; return at === document.body ? null : nameOf(at) }"
REACHABLE = """() => [...document.querySelectorAll("a[href], button, input, select, summary, [tabindex='0']")]
    .filter((element) => element.checkVisibility({visibilityProperty: true}) && !element.disabled).map(nameOf)"""
NAME_OF = """() => {
    const words = (element) => element.getAttribute("aria-label") ?? element.textContent.trim()
    window.nameOf = (element) => `${element.tagName} ${element.id || words(element)}`
}"""


@pytest.fixture(scope="module")
def server(browser: Browser) -> Iterator[ServerProcess]:
    """With something of everything: held, shared, waiting, given back, out of service."""
    env = {
        "SIMULATED_GPUS": "4",
        "GPU_POOL_TOKENS": f"admin:{ADMIN}",
    }
    with ServerProcess(env) as server:
        form = {"labels": {"command": "train.py", "team": "vision"}, "ttl_s": 3600}
        take(server, None, owner="ada", worker_id="w1", among=[0], **form)
        for owner in ("bob", "eve"):
            take(server, None, owner=owner, memory_mb=2000, among=[1], **form)
        queue(server, None, owner="dan", among=[0], priority=2, **form)
        released = take(server, None, owner="cyd", among=[2])
        server.ask(f"/leases/{released['id']}", "DELETE")
        admin = {"Authorization": f"Bearer {ADMIN}"}
        assert server.ask("/admin/gpus/3/drain", "POST", admin, {"reason": "a fan is broken"}).status == 200
        yield server


def wait_until_all_is_there(page: Page) -> None:
    """What the page asks for beside the pool comes a moment later."""
    wait_until_the_pool_is_there(page)
    for table in page.get_by_role("table").all():
        expect(table).to_contain_text("ada")
    expect(page.get_by_role("img", name="leases on 4 GPUs")).to_be_visible()


def wait_until_the_pool_is_there(page: Page) -> None:
    expect(card(page, 3)).to_contain_text("a fan is broken")
    expect(queue_of(page)).to_contain_text("dan")
    expect(happened(page)).to_contain_text("cyd")


def assert_fine(page: Page, *looks: tuple[ViewportSize, Scheme]) -> None:
    for viewport, scheme in looks:
        page.set_viewport_size(viewport)
        page.emulate_media(color_scheme=scheme)
        assert too_wide(page) == [], viewport
        assert serious_findings(page) == [], (viewport, scheme)


def test_axe_finds_nothing_serious_and_nobody_scrolls_sideways(open_page: OpenPage) -> None:
    page = open_page(viewport=PHONE)
    wait_until_all_is_there(page)
    assert_fine(page, (PHONE, "light"), (PHONE, "dark"), (WIDE, "dark"), (WIDE, "light"))

    page.get_by_role("button", name="Token…").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    assert_fine(page, (WIDE, "light"), (PHONE, "dark"))
    page.keyboard.press("Escape")

    use_token(page, ADMIN)
    expect(controls(page)).to_have_count(4 + 2 * 3 + 1)
    page.get_by_text("The same as a list").click()
    assert_fine(page, (WIDE, "light"), (PHONE, "dark"))

    card(page, 0).get_by_role("button", name="Drain").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    assert_fine(page, (WIDE, "light"), (PHONE, "dark"))


def test_the_tab_key_reaches_everything_in_the_order_it_is_read(page: Page) -> None:
    wait_until_all_is_there(page)
    use_token(page, ADMIN)
    expect(controls(page)).to_have_count(4 + 2 * 3 + 1)
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
        for _ in range(60):
            page.keyboard.press("Tab")
            if name in (page.evaluate(FOCUSED) or ""):
                return
        pytest.fail(f"the focus never came to {name}")

    wait_until_all_is_there(page)
    page.evaluate(NAME_OF)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the GPUs")).to_be_focused()
    expect(page.get_by_role("link", name="Skip to the GPUs")).to_be_in_viewport()
    tab_to("open-token")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog").get_by_label("Token")).to_be_focused()
    page.keyboard.type(ADMIN)
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_hidden()
    expect(page.get_by_text("Token of admin")).to_be_visible()
    # Those who may do something see so with the next look at the pool; until then there is nothing to come to.
    expect(controls(page)).to_have_count(4 + 2 * 3 + 1)

    tab_to("Drain GPU 2")
    page.keyboard.press("Enter")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("button", name="Drain GPU 2")).to_be_focused()  # where one was before
    page.keyboard.press("Space")
    expect(dialog.get_by_label("Reason")).to_be_focused()
    page.keyboard.type("no need for it")
    page.keyboard.press("Enter")
    expect(card(page, 2)).to_contain_text("no need for it")
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("button", name="Put back into service GPU 2")).to_be_focused()

    page.keyboard.press("Enter")
    expect(dialog).to_be_visible()
    tab_to("confirm-yes")
    page.keyboard.press("Enter")
    expect(card(page, 2)).to_contain_text("free")
    assert [gpu["is_out_of_service"] for gpu in server.json("/pool")["gpus"]] == [False, False, False, True]


def test_one_finds_ones_own(page: Page) -> None:
    cards = page.get_by_role("heading", level=4)
    expect(cards).to_have_count(4)
    shown = page.get_by_role("group", name="Show only").get_by_role("button")
    words = [text.split()[0] for text in shown.all_inner_texts()]
    # In one order, whichever GPU is in which state, so that they do not change places under the pointer.
    order = ["all", "free", "leased", "shared", "held", "draining", "busy", "out", "unhealthy", "unknown"]
    assert len(words) > 2
    assert words == [word for word in order if word in words]
    page.get_by_label("Find").fill("vision")
    expect(cards).to_have_count(2)
    page.get_by_label("Find").fill("nobody is called that")
    expect(page.get_by_text("No GPU matches.")).to_be_visible()
    page.get_by_label("Find").fill("")
    page.get_by_role("button", name="shared").click()
    expect(cards).to_have_text(["GPU 1 Simulated NVIDIA A100-SXM4-80GB"])
