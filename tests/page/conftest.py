"""A browser on the page of a real server.

Playwright's blocking calls keep an event loop running in this thread, in which no test with asyncio could run any more. So
it is started for a module and stopped after it, and not for the session as pytest-playwright has it. In a module that uses
the browser, no test can be `async`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import pytest
from playwright.sync_api import Browser, Page, Playwright, expect, sync_playwright
from pytest_playwright.pytest_playwright import CreateContextCallback

from gpu_worker_pool.testing import ServerProcess
from tests.page.chromium import NONE_FOUND, find_chromium, launch_options
from tests.page.watch import Watch

# How long something may take to be seen: on a busy machine the browser and the server wait for the processor.
expect.set_options(timeout=20_000)


class OpenPage(Protocol):
    """Opens the server's page, or another one of it, as a browser with these settings shows it."""

    def __call__(self, path: str = "/ui", **context: Any) -> Page: ...


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a browser, one line for each file says how to get one. A mark, because pytest sums up those only."""
    try:
        found = find_chromium()
    except FileNotFoundError as error:
        raise pytest.UsageError(str(error)) from None
    if found is None:
        for item in items:
            if isinstance(item, pytest.Function) and "browser" in item.fixturenames:
                item.add_marker(pytest.mark.skip(reason=NONE_FOUND))


@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="module")
def browser(playwright: Playwright, browser_type_launch_args: dict[str, Any]) -> Iterator[Browser]:
    options = launch_options(headless=browser_type_launch_args.get("headless", True))
    with playwright.chromium.launch(**browser_type_launch_args, **options) as browser:
        yield browser


@pytest.fixture(scope="module")
def browser_context_args() -> dict[str, Any]:
    return {"locale": "en-GB", "timezone_id": "UTC"}


@pytest.fixture(scope="module")
def server(browser: Browser) -> Iterator[ServerProcess]:
    """A module that needs another one has a fixture of this name."""
    with ServerProcess() as server:
        yield server


@pytest.fixture
def watch(server: ServerProcess) -> Iterator[Watch]:
    """What it has seen at the end, after the page is closed, fails the test."""
    watch = Watch(server.url)
    yield watch
    assert watch.complaints == []


@pytest.fixture
def open_page(watch: Watch, new_context: CreateContextCallback, server: ServerProcess) -> Iterator[OpenPage]:
    opened: list[Page] = []

    def open_page(path: str = "/ui", **context_args: Any) -> Page:
        context = new_context(**context_args)
        watch.over(context)
        page = context.new_page()
        opened.append(page)
        page.goto(server.url + path)
        return page

    yield open_page
    # A handler of a route that still answers when its page is closed would raise in the test after this one. A page whose routes
    # are taken off must ask for nothing any more: the server knows nothing of what they made up.
    for page in opened:
        if not page.is_closed():
            page.goto("about:blank")
        page.unroute_all(behavior="ignoreErrors")
        page.context.unroute_all(behavior="ignoreErrors")


@pytest.fixture
def page(open_page: OpenPage) -> Page:
    return open_page()
