"""What happens becomes visible on the open page, which is never loaded again."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from gpu_worker_pool.testing import ServerProcess
from tests.page.conftest import OpenPage
from tests.page.parts import card, connection, happened, queue_of
from tests.page.watch import Watch
from tests.server.leasing import a_process, queue, release, release_all, take


@pytest.fixture(scope="module")
def server(browser: Browser) -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "2"}) as server:
        yield server


def load_anew(page: Page) -> None:
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
    load_anew(page)
    expect(card(page, 0)).to_contain_text("free")
    expect(queue_of(page)).to_contain_text("Nobody waits.")

    ada = take(server, owner="ada", worker_id="w7", labels={"command": "train.py", "team": "vision"})
    for shown in ("leased", "ada", "train.py", "team: vision", re.compile(r"since \d\d:")):
        expect(card(page, ada)).to_contain_text(shown)
    expect(happened(page)).to_contain_text(f"ada has GPU {ada['gpus'][0]['gpu_id']}")
    expect(page).to_have_title(re.compile("1 free"))

    bob = take(server, owner="bob")
    eve = queue(server, owner="eve", priority=3)
    queue(server, owner="dan", gpus=2)
    first, second = (queue_of(page).get_by_role("listitem").nth(place) for place in range(2))
    expect(first).to_contain_text("eve")
    expect(first).to_contain_text("priority 3")
    expect(first).to_contain_text(eve["reason"].replace("1 of 1", "1 of 2"))
    expect(second).to_contain_text("dan")
    expect(second).to_contain_text("Position 2 of 2, waiting for 2 GPUs")
    expect(page).to_have_title(re.compile("0 free, 2 waiting"))

    release(server, bob["id"])
    expect(card(page, bob).get_by_role("strong")).to_have_text("eve")
    expect(queue_of(page).get_by_role("listitem")).to_have_count(1)
    expect(happened(page)).to_contain_text(f"bob no longer has GPU {bob['gpus'][0]['gpu_id']}: released")


def test_a_death_is_seen(page: Page, server: ServerProcess) -> None:
    with a_process() as process:
        lease = take(server, owner="mortal", pid=process.pid, host=socket.gethostname(), ttl_s=3600)
        expect(card(page, lease)).to_contain_text("mortal")
        process.kill()
        expect(happened(page)).to_contain_text("its process died")
        expect(card(page, lease)).to_contain_text("free")
        expect(card(page, lease)).not_to_contain_text("mortal")


def test_a_lost_connection_is_told_and_found_again(page: Page, server: ServerProcess, watch: Watch) -> None:
    watch.allow("net::ERR_")
    lease = take(server, owner="faithful", ttl_s=3600)
    expect(card(page, lease)).to_contain_text("faithful")

    server.kill()
    try:
        expect(connection(page)).to_have_text("no connection")
        expect(page.get_by_role("alert").first).to_contain_text("No connection to the server")
        expect(page.get_by_text(re.compile(r"measured [1-9]\d*\ss ago"))).to_be_visible()
        expect(card(page, lease)).to_contain_text("faithful")  # what was known stays readable
    finally:
        server.start()
    expect(connection(page)).to_have_text("live")
    expect(page.get_by_text("No connection to the server")).to_be_hidden()
    release(server, lease["id"])
    expect(card(page, lease)).to_contain_text("free")


def test_without_the_stream_of_events_the_page_looks_by_itself(page: Page, server: ServerProcess, watch: Watch) -> None:
    watch.allow("ERR_FAILED.*/events")
    page.context.route("**/events*", lambda route: route.abort())
    load_anew(page)
    expect(connection(page)).to_have_text("polling every few seconds")
    lease = take(server, owner="patient")
    expect(card(page, lease)).to_contain_text("patient")


def test_a_timeline_from_before_what_happened_last_is_soon_asked_for_again(page: Page, server: ServerProcess) -> None:
    told: list[str] = []

    def tell_the_first_one_twice(route: Route) -> None:
        """As the server does, which makes one for all who ask within five seconds."""
        told.append(told[0] if told else route.fetch().text())
        if len(told) <= 2:
            route.fulfill(body=told[0], content_type="application/json")
        else:
            route.fallback()

    page.route("**/ui/data/timeline*", tell_the_first_one_twice)
    load_anew(page)
    page.get_by_text("The same as a list").click()
    expect(page.get_by_role("img", name="leases on 2 GPUs")).to_be_visible()
    take(server, owner="tim")
    expect(page.locator("#timeline-list")).to_contain_text("tim from ")
    assert len(told) > 2
