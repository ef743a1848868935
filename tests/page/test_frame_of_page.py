"""The frame of the page's tests: it must notice, or it is decoration."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.page.conftest import Watch
from tests.page.parts import findings
from tests.server.told_server import Told, ToldServer, told_server

PURE = Path(__file__).with_name("pure.test.mjs")
POLICY = (
    "default-src 'none'; script-src 'self'; connect-src *; require-trusted-types-for 'script'; trusted-types 'none'"
)
PAGE = b"<!doctype html><html lang=en><title>A page</title><main><h1>A page</h1></main></html>"

# What a page might do, and what is put down of it.
WRONGS = {
    "console.error('it is broken')": "console: it is broken",
    "setTimeout(() => { throw new Error('not caught') })": "raised: not caught",
    "void Promise.reject(new Error('forgotten'))": "raised: forgotten",
    "fetch('/no-such')": "console: Failed to load resource: .* 404",
    "document.body.style.background = 'url(/image.png)'": "console: Loading the image .* violates",
    "try { document.body.innerHTML = '<b>bold</b>' } catch {}": "console: .*TrustedHTML",
}


@pytest.fixture(scope="module")
def own(browser: Browser) -> Iterator[ToldServer]:
    headers = {"Content-Type": "text/html", "Content-Security-Policy": POLICY}
    with told_server({"/": Told(PAGE, headers=headers)}) as server:
        yield server


@pytest.fixture
def watch(own: ToldServer) -> Watch:
    """One whose complaints are what the test is about."""
    return Watch(own.url)


@pytest.fixture
def page(own: ToldServer, browser: Browser, watch: Watch) -> Iterator[Page]:
    with browser.new_context() as context:
        watch.over(context)
        page = context.new_page()
        page.goto(own.url)
        yield page


def test_what_a_page_must_not_do_is_noticed_and_nothing_else(page: Page, watch: Watch) -> None:
    page.evaluate("() => { console.log('hello'); console.warn('well'); return fetch('/') }")
    assert watch.complaints == []
    for wrong, noticed in WRONGS.items():
        page.evaluate(f"() => {{ {wrong} }}")
        page.evaluate("() => new Promise(requestAnimationFrame)")
        for _ in range(100):
            page.evaluate("() => fetch('/')")  # what was asked for before may be answered after it
            if watch.complaints:
                break
        assert watch.complaints, wrong
        watch.allow(noticed)
        assert watch.complaints == []


def test_a_request_to_another_host_is_noticed_and_goes_nowhere(page: Page, watch: Watch) -> None:
    with told_server({}, host="127.0.0.2") as other:
        for url in (f"{other.url}/stolen", "http://elsewhere.test/"):
            said = page.evaluate("url => fetch(url, {mode: 'no-cors'}).then(() => 'came back', String)", url)
            assert "Failed to fetch" in said
            assert f"asked elsewhere: GET {url}" in watch.complaints
        assert other.asked == []


def test_axe_finds_what_keeps_somebody_out_and_nothing_else(page: Page) -> None:
    assert findings(page) == []
    page.evaluate("() => document.querySelector('main').append(document.createElement('input'))")
    (finding,) = findings(page)
    assert finding.startswith("label (critical): <input>")


def test_the_pure_parts_of_the_page() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node: apt-get install nodejs")
    ran = subprocess.run([node, "--test", str(PURE)], capture_output=True, text=True, check=False, timeout=100)
    assert ran.returncode == 0, ran.stdout + ran.stderr
