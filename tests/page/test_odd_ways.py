"""Proxies that want to know who asks or hold the stream back, answers that come late, clocks that are wrong."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from gpu_worker_pool.testing import ServerProcess
from tests.page.conftest import OpenPage, Watch
from tests.page.parts import connection, in_full, row, timeline, use_token
from tests.server.leasing import release_all, take

ADMIN = "a-secret-of-admin"


@pytest.fixture(scope="module")
def server(browser: Browser) -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "2", "GPU_POOL_TOKENS": f"admin:{ADMIN}"}) as server:
        yield server


@pytest.fixture
def page(open_page: OpenPage, server: ServerProcess) -> Iterator[Page]:
    page = open_page()
    expect(connection(page)).to_have_text("live")
    yield page
    release_all(server, {"Authorization": f"Bearer {ADMIN}"})


def test_a_proxy_that_wants_a_cookie_is_given_it(page: Page, server: ServerProcess, watch: Watch) -> None:
    watch.allow("401")
    page.context.add_cookies([{"name": "session", "value": "1", "url": server.url}])

    def let_in(route: Route) -> None:
        if "session=1" in route.request.all_headers().get("cookie", ""):
            route.fallback()
        else:
            route.fulfill(status=401, body="who are you?")

    page.context.route("**/ui/data/*", let_in)
    page.reload()
    expect(connection(page)).to_have_text("live")
    page.context.clear_cookies()
    expect(connection(page)).to_have_text("no connection")
    expect(page.get_by_role("alert")).to_contain_text("status 401")


def test_a_stream_that_is_held_back_is_not_relied_on(page: Page, server: ServerProcess) -> None:
    page.context.route("**/events*", lambda _: None)  # never answered
    page.reload()
    expect(connection(page)).to_have_text("polling every few seconds")
    lease = take(server, owner="patient")
    expect(row(page, lease)).to_contain_text("patient")
    expect(page.get_by_text("have not been measured")).to_be_hidden()


def test_a_server_that_stands_still_is_no_connection_and_no_fault_of_the_gpus(
    page: Page, server: ServerProcess
) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        expect(connection(page)).to_have_text("no connection")
        expect(page.get_by_role("alert")).to_contain_text("does not answer")
        expect(page.get_by_text("have not been measured")).to_be_hidden()
    finally:
        os.kill(server.pid, signal.SIGCONT)
    expect(connection(page)).to_have_text("live")


def test_what_was_cancelled_does_not_happen_though_its_answer_comes_late(page: Page, server: ServerProcess) -> None:
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/ui/data/me", hold)
    use_token(page, ADMIN)
    with page.expect_response("**/ui/data/me"):
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_be_hidden()
        held.pop().continue_()
    page.evaluate("() => new Promise((resolve) => setTimeout(resolve))")
    expect(page.get_by_role("button", name="Log out")).to_be_hidden()
    page.unroute("**/ui/data/me")

    lease = take(server, owner="bob", among=[1])
    page.route("**/revoke*", hold)
    row(page, lease).get_by_role("button", name="End the lease").click()
    page.get_by_role("dialog").get_by_role("button", name="End the lease").click()
    page.keyboard.press("Escape")
    in_full(page, 0).get_by_role("button", name="Drain GPU 0").click()
    page.get_by_label("Reason").fill("a fan")
    held.pop().continue_()
    expect(page.get_by_text("The lease of bob on GPU 1 is ended.")).to_be_visible()
    expect(page.get_by_role("dialog", name="Take GPU 0 out of service?")).to_be_visible()
    expect(page.get_by_label("Reason")).to_have_value("a fan")


def test_the_readers_clock_does_not_matter(page: Page, server: ServerProcess) -> None:
    page.add_init_script("const real = Date.now; Date.now = () => real() + 5 * 3600 * 1000")
    lease = take(server, owner="bob")
    page.reload()
    row(page, lease).get_by_role("button", name="End the lease").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(re.compile(r"held for \d+\ss\."))
    dialog.get_by_role("button", name="End the lease").click()
    line = timeline(page, lease["gpus"][0]["gpu_id"])
    expect(line).to_have_attribute("aria-label", re.compile(r"bob\W* from .*ended by an operator; \d+\ss"))


def test_a_lease_that_ended_before_it_could_be_ended_is_told_so(page: Page, server: ServerProcess) -> None:
    lease = take(server, owner="bob")
    row(page, lease).get_by_role("button", name="End the lease").click()
    release_all(server, {"Authorization": f"Bearer {ADMIN}"})
    page.get_by_role("dialog").get_by_role("button", name="End the lease").click()
    expect(page.get_by_text("had ended already: released")).to_be_visible()
