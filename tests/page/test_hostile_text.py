"""Names are text on the page, whatever they look like and in whichever direction they are written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from gpu_worker_pool.testing import ServerProcess
from tests.page.conftest import OpenPage
from tests.page.parts import happened, in_full, queue_of, row, too_wide
from tests.server.leasing import queue, take

ARABIC = "مستخدم"
HOSTILE = (
    "<script>window.hasRun = 1</script>",
    "<img src=x onerror='window.hasRun = 1'>",
    "\"'><svg onload=window.hasRun=1>",
    "</title></style></textarea><b>bold</b>&lt;i&gt;&#x3c;",
    "javascript:window.hasRun=1",
    "${window.hasRun=1}{{window.hasRun=1}}",
    "__proto__",
    "שלום <b>עולם</b> سلام",
    ARABIC,
    "W" * 256,
)
LEFT_OF = "(element) => element.getBoundingClientRect().left"


@pytest.fixture(scope="module")
def server(browser: Browser) -> Iterator[ServerProcess]:
    """With a holder and a waiter of each name."""
    with ServerProcess({"SIMULATED_GPUS": str(len(HOSTILE) + 1)}) as server:
        for number, text in enumerate(HOSTILE):
            form: dict[str, Any] = {"owner": text, "worker_id": text, "ttl_s": 3600}
            form["labels"] = {"command": text, "note": text}
            take(server, among=[number], **form)
            queue(server, among=[number], **form)
        drained = server.ask(f"/admin/gpus/{len(HOSTILE)}/drain", "POST", None, {"reason": HOSTILE[0]})
        assert drained.status == 200, drained
        yield server


def assert_nothing_ran(page: Page) -> None:
    assert page.evaluate("window.hasRun") is None
    assert page.locator("script").count() == 1  # the page's own
    assert page.locator("img, iframe, style, textarea, b:text('bold'), [onload], [onerror]").count() == 0


def test_every_text_is_shown_as_it_is(page: Page) -> None:
    for number, text in enumerate(HOSTILE):
        expect(row(page, number).locator(".owner bdi")).to_have_text(text)
        expect(in_full(page, number).get_by_text(f"note: {text}", exact=True)).to_be_visible()
        expect(queue_of(page).locator(".owner bdi").get_by_text(text, exact=True)).to_be_visible()
    expect(row(page, len(HOSTILE)).get_by_text(HOSTILE[0])).to_be_visible()  # the reason why it is drained
    row(page, 0).get_by_role("button", name="End the lease").click()
    expect(page.get_by_role("dialog")).to_contain_text(HOSTILE[0])
    page.keyboard.press("Escape")
    queue_of(page).get_by_role("button", name="Take out").nth(1).click()
    expect(page.get_by_role("dialog")).to_contain_text(HOSTILE[1])
    page.keyboard.press("Escape")
    for number, text in enumerate(HOSTILE):
        expect(happened(page).get_by_text(f"{text} has GPU {number} {text}", exact=True)).to_be_visible()
    expect(page.get_by_role("region", name="Table of GPU-hours").get_by_text(HOSTILE[0], exact=True)).to_be_visible()
    assert_nothing_ran(page)


def test_a_name_that_is_written_from_right_to_left_does_not_turn_its_sentence_around(page: Page) -> None:
    number = HOSTILE.index(ARABIC)
    event = happened(page).get_by_role("listitem").filter(has_text=f"{ARABIC} has GPU {number}")
    name, gpu = event.locator("bdi").first, event.locator("bdi").nth(1)
    expect(name).to_have_text(ARABIC)
    expect(gpu).to_have_text(f"GPU {number}")
    assert name.evaluate(LEFT_OF) < gpu.evaluate(LEFT_OF)


def test_a_very_long_name_takes_one_line_and_does_not_widen_the_page(open_page: OpenPage) -> None:
    page, longest = open_page(viewport={"width": 360, "height": 640}), len(HOSTILE) - 1
    expect(row(page, longest)).to_contain_text(HOSTILE[-1])
    heights = [row(page, number).evaluate("(row) => row.offsetHeight") for number in (0, longest)]
    assert heights[0] == heights[1]
    assert too_wide(page) == []
    row(page, longest).get_by_role("button", name="End the lease").click()
    assert too_wide(page) == []
    box = page.get_by_role("dialog").bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360
    page.keyboard.press("Escape")
    expect(happened(page).get_by_text(HOSTILE[-1]).first).to_be_visible()
    assert too_wide(page) == []
