#!/usr/bin/env python3
"""Make the pictures of the page in docs/images, from a real server with simulated GPUs, in headless Chromium.

Run it with `make pictures`. It needs Chromium (Debian: apt-get install chromium), or name one with CHROMIUM=...
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright
from seeded import ROOT, let_them_ask, seeded_server

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
STEP_S = 1.5
PICTURES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("page.png", {"color_scheme": "light", "viewport": {"width": 1280, "height": 720}}),
    ("page-dark.png", {"color_scheme": "dark", "viewport": {"width": 1280, "height": 720}}),
    ("page-phone.png", {"color_scheme": "light", "viewport": {"width": 390, "height": 844}}),
)
WITH_TIMELINE, TIMELINE = "page.png", "page-timeline.png"
NAMES = ("chromium", "chromium-browser", "chromium-headless-shell")


def main() -> None:
    """Start the server, let the invented users ask, take the pictures, stop everything."""
    chromium = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if chromium is None:
        sys.exit("There is no Chromium: apt-get install chromium, or name one with CHROMIUM=...")
    flags = ["--disable-gpu", *(["--no-sandbox"] if os.getuid() == 0 else [])]
    with seeded_server() as url, sync_playwright() as playwright:
        let_them_ask(url, STEP_S)
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        for name, look in PICTURES:
            page = _take(browser, url, FOLDER / name, look)
            if name == WITH_TIMELINE:
                page.get_by_role("region", name="Timeline").screenshot(path=FOLDER / TIMELINE)
            page.close()
        browser.close()


def _take(browser: Browser, url: str, path: Path, look: dict[str, Any]) -> Page:
    page = browser.new_page(locale="en-GB", **look)
    page.goto(f"{url}/ui")
    expect(page.get_by_role("banner").get_by_role("status")).to_have_text("live", timeout=20_000)
    # The past comes a moment after the pool.
    expect(page.locator(".bar[data-kind=past]")).not_to_have_count(0, timeout=20_000)
    page.screenshot(path=path)
    print(f"{path} is written")  # noqa: T201
    return page


if __name__ == "__main__":
    main()
