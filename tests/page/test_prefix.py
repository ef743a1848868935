"""The page, and the two pages that show the API, of a server that is not at the root of its address."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from gpu_worker_pool.testing import ServerProcess
from tests.page.conftest import OpenPage, Watch
from tests.page.parts import controls, in_full, row, use_token

ADMIN = "the-token-of-admin"
PREFIX = "/gpu/pool"


@pytest.fixture(scope="module")
def server(browser: Browser) -> Iterator[ServerProcess]:
    env = {"SIMULATED_GPUS": "1xT4", "GPU_POOL_NODE": "box1", "API_PREFIX": PREFIX, "GPU_POOL_TOKENS": f"admin:{ADMIN}"}
    with ServerProcess(env) as server:
        yield server


def test_it_shows_the_gpus_and_takes_a_token(open_page: OpenPage) -> None:
    page = open_page(f"{PREFIX}/ui")
    expect(page.get_by_role("heading", level=1)).to_have_text("box1")
    expect(row(page, 0)).to_contain_text("free")
    use_token(page, ADMIN)
    expect(in_full(page, 0)).to_contain_text("Simulated Tesla T4")
    expect(controls(page)).to_have_text(["Drain GPU 0…", "Drain the box…", "Book…"])


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_the_api_is_shown_under_a_policy_as_strict_as_the_pages(
    open_page: OpenPage, watch: Watch, server: ServerProcess, path: str
) -> None:
    # ReDoc would show a logo from its maker's site, which the policy forbids. Any other complaint fails the test.
    watch.allow(r"logo-mini\.svg")
    path = f"{PREFIX}{path}"
    expect(open_page(path).get_by_text("/gpu/summary").first).to_be_visible()
    headers, of_page = server.ask(path).headers, server.ask(f"{PREFIX}/ui").headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "script-src 'self' 'sha256-" in headers["content-security-policy"] or path.endswith("/redoc")
    for name in ("x-content-type-options", "referrer-policy", "x-frame-options", "cross-origin-opener-policy"):
        assert headers[name] == of_page[name]
