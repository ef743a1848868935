"""The two pages that show the API, in a browser: they work under a policy as strict as the page's own allows."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from gpu_worker_pool.testing import ServerProcess
from tests.page.conftest import OpenPage
from tests.page.watch import Watch


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_the_api_is_shown_and_nothing_else_breaks_the_policy(open_page: OpenPage, watch: Watch, path: str) -> None:
    # ReDoc would show a logo from its maker's site, which the policy forbids. Any other complaint fails the test.
    watch.allow(r"logo-mini\.svg")
    expect(open_page(path).get_by_text("/gpu/summary").first).to_be_visible()


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_both_have_the_headers_of_the_page(server: ServerProcess, path: str) -> None:
    headers, of_page = server.ask(path).headers, server.ask("/ui").headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "script-src 'self' 'sha256-" in headers["content-security-policy"] or path == "/redoc"
    for name in ("x-content-type-options", "referrer-policy", "x-frame-options", "cross-origin-opener-policy"):
        assert headers[name] == of_page[name]
