"""A browser on the page of a real server.

Playwright's blocking calls keep an event loop running in this thread, in which no test with asyncio could run any more. So
it is started for a module and stopped after it, and not for the session as pytest-playwright has it. In a module that uses
the browser, no test can be `async`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Playwright,
    Request,
    WebError,
    expect,
    sync_playwright,
)
from pytest_playwright.pytest_playwright import CreateContextCallback

from gpu_worker_pool.testing import ServerProcess

# How long something may take to be seen: on a busy machine the browser and the server wait for the processor.
expect.set_options(timeout=20_000)


# The browser is one that is installed on this machine. None is ever downloaded.
NAMES = ("chromium", "chromium-browser", "google-chrome")
# The same engine without what a window needs: it takes half the processor time.
HEADLESS_NAMES = ("chromium-headless-shell", *NAMES)
NONE_FOUND = "no Chromium: apt-get install chromium-headless-shell, or name one with CHROMIUM=/path/to/it"

ARGUMENTS = [
    "--disable-gpu",
    # Wherever a page or the browser itself wants to go, there is nothing but this machine.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]


def find_chromium(environ: Mapping[str, str] = os.environ, names: Sequence[str] = HEADLESS_NAMES) -> str | None:
    """The path of the one that CHROMIUM names, else of the first on the PATH; None where there is none."""
    named, path = environ.get("CHROMIUM"), environ.get("PATH", "")
    if named:
        found = shutil.which(named, path=path)
        if found is None:
            raise FileNotFoundError(f"CHROMIUM={named} is not a program; name one that is, or unset it")
        return found
    return next(filter(None, (shutil.which(name, path=path) for name in names)), None)


def launch_options(*, headless: bool = True) -> dict[str, Any]:
    """For Playwright's launch()."""
    found = find_chromium(names=HEADLESS_NAMES if headless else NAMES)
    # Chromium does not start as root with its sandbox.
    return {"executable_path": found, "args": ARGUMENTS, "chromium_sandbox": os.geteuid() != 0}


class Watch:
    """Puts down what a page must never do: print an error, raise one, break its policy, ask another host.

    What the browser blocks because of the Content-Security-Policy it prints as an error.
    """

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._seen: list[str] = []
        self._allowed: list[str] = []

    def over(self, context: BrowserContext) -> None:
        """Watch all pages of this context."""
        context.on("console", self._on_console)
        context.on("weberror", self._on_error)
        context.on("request", self._on_request)

    def allow(self, pattern: str) -> None:
        """This test does something of which the browser itself prints an error, like a refused connection."""
        self._allowed.append(pattern)

    @property
    def complaints(self) -> list[str]:
        """What was seen and is not allowed."""
        return [text for text in self._seen if not any(re.search(pattern, text) for pattern in self._allowed)]

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self._seen.append(f"console: {message.text} ({message.location['url']})")

    def _on_error(self, raised: WebError) -> None:
        self._seen.append(f"raised: {raised.error.message} {raised.error.stack or ''}")

    def _on_request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in {"data", "blob"} and f"{parts.scheme}://{parts.netloc}" != self._origin:
            self._seen.append(f"asked elsewhere: {request.method} {request.url}")


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
