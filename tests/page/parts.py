"""The parts of the page, found as somebody finds who reads or hears it."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import Locator, Page


def card(page: Page, lease_or_gpu: dict[str, Any] | int) -> Locator:
    """Of the GPU with this index, or of the one that the lease is on."""
    gpu = lease_or_gpu if isinstance(lease_or_gpu, int) else lease_or_gpu["gpus"][0]["gpu_id"]
    heading = page.get_by_role("heading", level=4, name=re.compile(rf"^GPU {gpu}\b"))
    return page.get_by_role("listitem").filter(has=heading)


def queue_of(page: Page) -> Locator:
    return page.get_by_role("region", name=re.compile("^Queue"))


def happened(page: Page) -> Locator:
    return page.get_by_role("region", name="What happened last")


def connection(page: Page) -> Locator:
    return page.get_by_role("status")


def controls(page: Page) -> Locator:
    """Everything that changes something."""
    return page.get_by_role("button", name=re.compile("Release|Revoke|Drain|Put back|Take out"))


def use_token(page: Page, token: str) -> None:
    page.get_by_role("button", name="Token…").click()
    page.get_by_role("dialog").get_by_label("Token").fill(token)
    page.get_by_role("button", name="Use it").click()


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
