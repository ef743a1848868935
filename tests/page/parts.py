"""The parts of the page, found as somebody finds them who reads or hears it."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

from playwright.sync_api import Locator, Page, expect

_SOURCE = files("axe_playwright_python") / "axe.min.js"
_RUN = "async () => (await axe.run(document, {resultTypes: ['violations'], selectors: false})).violations"
# A caller that comes through a proxy is nobody to the server.
VISITOR = {"X-Forwarded-For": "192.0.2.1"}


def row(page: Page, lease_or_gpu: dict[str, Any] | int) -> Locator:
    """Of the GPU with this index, or of the first one that the lease is on."""
    gpu = lease_or_gpu if isinstance(lease_or_gpu, int) else lease_or_gpu["gpus"][0]["gpu_id"]
    return page.get_by_role("row", name=f"GPU {gpu}", exact=True)


def in_full(page: Page, lease_or_gpu: dict[str, Any] | int) -> Locator:
    """The same GPU with all that is known of it."""
    number = row(page, lease_or_gpu).get_by_role("button", name=re.compile("^GPU"))
    if number.get_attribute("aria-expanded") == "false":
        number.click()
    expect(number).to_have_attribute("aria-expanded", "true")
    return page.locator(".details")


def queue_of(page: Page) -> Locator:
    return page.get_by_role("region", name="Queue", exact=True)


def waiters(page: Page) -> Locator:
    return queue_of(page).get_by_role("listitem")


def happened(page: Page) -> Locator:
    """What happened last; in the other view."""
    page.get_by_role("link", name="Usage").click()
    return page.get_by_role("region", name="What happened last")


def timeline(page: Page, gpu: int) -> Locator:
    return page.get_by_role("region", name="Timeline").get_by_role("group", name=re.compile(rf"^GPU {gpu}\b.*: "))


def connection(page: Page) -> Locator:
    return page.get_by_role("banner").get_by_role("status")


def controls(page: Page) -> Locator:
    """Everything that changes something."""
    return page.get_by_role("button", name=re.compile("^(End the|Drain|Put back|Take out|Book|Cancel)"))


def use_token(page: Page, token: str) -> None:
    page.get_by_role("button", name=re.compile("Token…|Log in…")).click()
    page.get_by_role("dialog").get_by_label("Token").fill(token)
    page.get_by_role("dialog").get_by_role("button", name="Log in").click()


def confirm(page: Page, yes: str, **fields: str) -> None:
    """Fill the fields of the dialog that is open, and confirm it."""
    dialog = page.get_by_role("dialog")
    for label, text in fields.items():
        dialog.get_by_label(label).fill(text)
    dialog.get_by_role("button", name=yes, exact=True).click()
    expect(dialog).to_be_hidden()


def too_wide(page: Page) -> list[str]:
    """What makes the page wider than its window, so that one would have to scroll sideways; empty where nothing does."""
    found: list[str] = page.evaluate(
        """() => {
            const room = document.documentElement.clientWidth
            if (document.documentElement.scrollWidth <= room) return []
            const isWider = (element) => element.getBoundingClientRect().right > room + 1
            return [...document.querySelectorAll("body, body *")].filter(isWider).map(
                (element) => `${element.tagName} ${element.className} ${element.textContent.slice(0, 40)}`
            )
        }"""
    )
    return found


def findings(page: Page) -> list[str]:
    """A line for each element that axe finds something wrong with, as the page is now."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(_SOURCE.read_text(encoding="utf-8"))  # by the debugger, which no policy of the page stops
    return [
        f"{rule['id']} ({rule['impact']}): {element['html']}: {element['failureSummary']}"
        for rule in page.evaluate(_RUN)
        for element in rule["nodes"]
    ]
