"""Whatever somebody calls himself, his job or his GPU, on the page it is text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from gpu_worker_pool.testing import ServerProcess
from tests.page.conftest import OpenPage
from tests.page.parts import card, happened, queue_of, too_wide, use_token
from tests.server.leasing import queue, take

HOSTILE = (
    "<script>window.hasRun = 1</script>",
    "<img src=x onerror='window.hasRun = 1'>",
    "\"'><svg onload=window.hasRun=1>",
    "</title></style></textarea><b>bold</b>&lt;i&gt;&#x3c;",
    "javascript:window.hasRun=1",
    "${window.hasRun=1}{{window.hasRun=1}}",
    "__proto__",
    "שלום <b>עולם</b> سلام",
    "W" * 256,
)
ADMIN = "the-token-of-admin"


@pytest.fixture(scope="module")
def server(browser: Browser) -> Iterator[ServerProcess]:
    """With a holder and a waiter of each name."""
    with ServerProcess({"SIMULATED_GPUS": str(len(HOSTILE) + 1), "GPU_POOL_TOKENS": f"admin:{ADMIN}"}) as server:
        admin = {"Authorization": f"Bearer {ADMIN}"}
        for number, text in enumerate(HOSTILE):
            form: dict[str, Any] = {
                "owner": text,
                "worker_id": text,
                "labels": {"command": text, "note": text},
                "ttl_s": 3600,
            }
            take(server, among=[number], **form)
            queue(server, among=[number], **form)
        drained = server.ask(f"/admin/gpus/{len(HOSTILE)}/drain", "POST", admin, {"reason": HOSTILE[0]})
        assert drained.status == 200, drained
        yield server


def assert_nothing_ran(page: Page) -> None:
    assert page.evaluate("window.hasRun") is None
    assert page.locator("script").count() == 1  # the page's own
    assert page.locator("img, iframe, style, textarea, b, [onload], [onerror]").count() == 0


def test_every_text_is_shown_as_it_is(page: Page) -> None:
    for number, text in enumerate(HOSTILE):
        mine = card(page, number)
        expect(mine.get_by_role("strong")).to_have_text(text)
        expect(mine.locator(".details").first).to_have_text(text)
        expect(mine.get_by_text(f"note: {text}", exact=True)).to_be_visible()
        expect(queue_of(page).get_by_role("strong").filter(has_text=text).first).to_be_visible()
        expect(happened(page).get_by_text(f"{text} has GPU {number}", exact=True)).to_be_visible()
    expect(card(page, len(HOSTILE)).get_by_text(HOSTILE[0])).to_be_visible()  # the reason why it is drained
    for table in ("usage", "weeks"):
        expect(page.locator(f"#{table}").get_by_text(HOSTILE[0], exact=True)).to_be_visible()
    page.get_by_text("The same as a list").click()
    for picture_or_list in ("Colours of the owners", "Who held which GPU"):
        expect(page.get_by_label(picture_or_list).get_by_text(HOSTILE[0]).first).to_be_visible()
    assert_nothing_ran(page)


def test_they_are_text_too_where_one_confirms(page: Page) -> None:
    use_token(page, ADMIN)
    for number, word in enumerate(("Release", "Revoke", "Drain")):
        card(page, number).get_by_role("button", name=word).click()
        expect(page.get_by_role("dialog")).to_contain_text(HOSTILE[number])
        page.keyboard.press("Escape")
    queue_of(page).get_by_role("button", name="Take out").first.click()
    expect(page.get_by_role("dialog")).to_contain_text(HOSTILE[0])
    assert_nothing_ran(page)


def test_a_very_long_name_does_not_widen_the_page(open_page: OpenPage) -> None:
    page = open_page(viewport={"width": 360, "height": 640})
    expect(happened(page).get_by_text(HOSTILE[-1]).first).to_be_visible()
    assert too_wide(page) == []
    use_token(page, ADMIN)
    card(page, len(HOSTILE) - 1).get_by_role("button", name="Release").click()
    assert too_wide(page) == []
    box = page.get_by_role("dialog").bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360
