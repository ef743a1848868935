"""What happens becomes visible on the open page, which is never loaded again; and what fails is told for what it is."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from gpu_worker_pool.testing import ServerProcess
from tests.page.conftest import OpenPage, Watch
from tests.page.parts import VISITOR, connection, happened, in_full, queue_of, row, timeline, waiters
from tests.server.leasing import a_process, queue, release, release_all, take


@pytest.fixture(scope="module")
def server(browser: Browser) -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "2"}) as server:
        yield server


def load_again(page: Page) -> None:
    """The last time it is loaded."""
    page.reload()
    page.evaluate("() => { window.isTheSame = true }")


@pytest.fixture
def page(open_page: OpenPage, server: ServerProcess) -> Iterator[Page]:
    page = open_page("/")
    assert page.url == f"{server.url}/ui"  # where a browser is sent that comes to the server
    page.evaluate("() => { window.isTheSame = true }")
    expect(connection(page)).to_have_text("live")
    yield page
    assert page.evaluate("window.isTheSame")
    release_all(server)


def test_a_grant_a_queue_and_a_release_are_seen(page: Page, server: ServerProcess) -> None:
    # Without what it does every second, the page hears of it by the stream of events or not at all.
    page.add_init_script("window.setInterval = () => 0")
    load_again(page)
    expect(row(page, 0)).to_contain_text("free")
    expect(page.get_by_text("2 GPUs are free.")).to_be_visible()
    expect(queue_of(page)).to_contain_text("Nobody waits.")

    ada = take(server, owner="ada", worker_id="w7", labels={"command": "train.py", "team": "vision"})
    for text in ("in use", "ada", "train.py"):
        expect(row(page, ada)).to_contain_text(text)
    for shown in ("team: vision", re.compile(r"for \d+\s(s|min)"), re.compile(r"Temperature\d+\s°C")):
        expect(in_full(page, ada)).to_contain_text(shown)
    expect(page).to_have_title(re.compile("1 free"))

    bob = take(server, owner="bob")
    eve = queue(server, owner="eve", priority=3)
    queue(server, owner="dan", gpus=2)
    expect(waiters(page).nth(0)).to_contain_text(re.compile("eve.*1 GPU, priority\\s3"))
    expect(waiters(page).nth(1)).to_contain_text(re.compile("dan.*2 GPUs"))
    expect(page.get_by_text("No GPU is free")).to_be_visible()
    expect(queue_of(page)).to_contain_text(re.compile("wait for: 2 leased by .*ada"))
    release(server, eve["id"])
    expect(waiters(page)).to_have_count(1)
    release(server, bob["id"])
    gpu = bob["gpus"][0]["gpu_id"]
    expect(happened(page)).to_contain_text(f"bob no longer has GPU {gpu}: released")
    expect(happened(page)).to_contain_text("eve no longer waits: cancelled by")


def test_a_death_is_seen(page: Page, server: ServerProcess) -> None:
    with a_process() as process:
        lease = take(server, owner="mortal", pid=process.pid, host=socket.gethostname(), ttl_s=3600)
        expect(row(page, lease)).to_contain_text("mortal")
        process.kill()
        expect(row(page, lease)).to_contain_text("free")
        expect(row(page, lease)).not_to_contain_text("mortal")
        expect(happened(page)).to_contain_text("its process died")


def test_a_lost_connection_is_told_and_found_again(page: Page, server: ServerProcess, watch: Watch) -> None:
    watch.allow("net::ERR_")
    lease = take(server, owner="faithful", ttl_s=3600)
    expect(row(page, lease)).to_contain_text("faithful")

    server.kill()
    try:
        expect(connection(page)).to_have_text("no connection")
        expect(page.get_by_role("alert")).to_contain_text("No connection to the server")
        expect(page.get_by_text(re.compile(r"measured [1-9]\d*\ss ago"))).to_be_visible()
        expect(row(page, lease)).to_contain_text("faithful")  # what was known stays readable
    finally:
        server.start()
    expect(connection(page)).to_have_text("live")
    expect(page.get_by_text("No connection to the server")).to_be_hidden()
    release(server, lease["id"])
    expect(row(page, lease)).to_contain_text("free")


@pytest.mark.parametrize("is_operator", [False, True])
def test_a_leader_or_database_that_is_away_is_not_called_a_lost_connection(
    open_page: OpenPage, watch: Watch, server: ServerProcess, is_operator: bool
) -> None:
    """A visitor reads the page's own words; what the server says in detail is for operators."""
    watch.allow("401|503")
    page = open_page(extra_http_headers={} if is_operator else VISITOR)
    expect(row(page, 0)).to_be_visible()
    why = "the database at postgresql://admin@127.0.0.1:5432/pool: [Errno 111] Connect call failed"
    page.context.route("**/ui/data/pool", lambda route: route.fulfill(status=503, json={"detail": why}))
    expect(connection(page)).to_have_text("grants pause")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("The server answers, but not the leader or the database behind it")
    expect(alert).to_contain_text("leases go on")
    expect(page.get_by_text("No connection")).to_be_hidden()
    expect(page.get_by_text("postgresql")).to_have_count(1 if is_operator else 0)


def test_before_the_first_answer_only_that_is_told(open_page: OpenPage, watch: Watch, server: ServerProcess) -> None:
    watch.allow("ERR_FAILED")
    page = open_page()
    page.context.route("**/ui/data/pool", lambda route: route.abort())
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("There is nothing to show yet")
    expect(page.get_by_role("region")).to_have_count(0)
    page.context.unroute("**/ui/data/pool")
    expect(row(page, 0)).to_be_visible()


def test_a_past_that_was_told_before_the_last_event_is_soon_asked_for_again(page: Page, server: ServerProcess) -> None:
    with page.expect_request("**/timeline?*") as first:
        page.reload()
    before = server.json(first.value.url.removeprefix(server.url))
    asked: list[str] = []

    def tell_it_twice(route: Route) -> None:
        """As a server might that makes one answer for several callers."""
        asked.append(route.request.url)
        if len(asked) <= 2:
            route.fulfill(json=before)
        else:
            route.fallback()

    page.route("**/timeline?*", tell_it_twice)
    with page.expect_response("**/timeline?*"):
        load_again(page)
    lease = take(server, owner="tim")
    release(server, lease["id"])
    line = timeline(page, lease["gpus"][0]["gpu_id"])
    expect(line).to_have_attribute("aria-label", re.compile(r"tim\W* from .* released"))
    assert len(asked) > 2
