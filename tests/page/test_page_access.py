"""What can be done on the page: only what the user may do, and nothing without a confirmation that says what will happen."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from gpu_worker_pool.testing import ServerProcess
from tests.page.conftest import OpenPage, Watch
from tests.page.parts import VISITOR, confirm, controls, in_full, queue_of, row, use_token, waiters
from tests.server.leasing import held, new_id, put, release_all

ADMIN, ADA = "the-token-of-admin", "the-token-of-ada"
Leases = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture(scope="module")
def server(browser: Browser) -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "2", "GPU_POOL_TOKENS": f"admin:{ADMIN},ada:{ADA}"}) as server:
        yield server


@pytest.fixture
def page(open_page: OpenPage, watch: Watch) -> Page:
    """As a visitor sees it, who has a token at most."""
    watch.allow("401")
    return open_page(extra_http_headers=VISITOR)


def lease_of(server: ServerProcess, token: str | None = None, **form: Any) -> dict[str, Any]:
    headers = None if token is None else bearer(token)
    lease: dict[str, Any] = put(server, new_id(), headers=headers, ttl_s=3600, **form).json
    return lease


@pytest.fixture
def leases(server: ServerProcess) -> Iterator[Leases]:
    """One of ada's, one of bob's, and one of eve's who waits."""
    yield lease_of(server, ADA, among=[0]), lease_of(server, owner="bob", among=[1]), lease_of(server, owner="eve")
    release_all(server, bearer(ADMIN))


def dialog_of(button: Locator) -> Locator:
    """What is asked when it is pressed."""
    button.click()
    dialog = button.page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    return dialog


def cancel_and_confirm(server: ServerProcess, button: Locator, *named: str, yes: str, **fields: str) -> None:
    """Press it three times: twice one thinks better of it, and nothing has changed."""

    def all_there_is() -> list[Any]:
        pool = server.json("/pool")
        # A lease that drains ends by itself.
        live = [lease for lease in (*pool["leases"], *pool["queue"]) if lease["state"] != "draining"]
        leases = [(lease["id"], lease["state"]) for lease in live]
        return [leases, [gpu["is_out_of_service"] for gpu in pool["gpus"]]]

    before = all_there_is()
    dialog = dialog_of(button)
    for text in named:
        expect(dialog).to_contain_text(text)
    dialog.get_by_role("button", name="Cancel", exact=True).click()
    expect(dialog).to_be_hidden()
    dialog_of(button)
    button.page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert all_there_is() == before

    dialog_of(button)
    confirm(button.page, yes, **fields)
    assert all_there_is() != before


def test_a_visitor_can_do_nothing_and_a_wrong_token_is_told(page: Page, leases: Leases) -> None:
    expect(row(page, leases[0])).to_contain_text("ada")
    expect(queue_of(page)).to_contain_text("eve")
    expect(controls(page)).to_have_count(0)

    page.get_by_role("button", name="Log in…").click()
    expect(page.get_by_role("dialog")).to_contain_text("gpu-pool token add NAME")
    expect(page.get_by_role("dialog")).to_contain_text("operator or administrator")
    page.keyboard.press("Escape")
    use_token(page, "no-such-token")
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("alert")).to_contain_text("token")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(controls(page)).to_have_count(0)


def test_an_owner_may_end_what_is_its_own(page: Page, leases: Leases, server: ServerProcess) -> None:
    ada, _, _ = leases
    use_token(page, ADA)
    expect(page.get_by_role("banner")).to_contain_text("ada")
    expect(page.get_by_text("You: GPU 0, ")).to_be_visible()
    expect(row(page, ada)).to_have_attribute("data-mine", "true")
    expect(controls(page)).to_have_text(["End…", "Book…"])
    end = row(page, ada).get_by_role("button", name="End the lease")
    cancel_and_confirm(server, end, "ada", ada["id"], yes="End the lease")
    expect(end).to_have_count(0)
    assert server.json(f"/leases/{ada['id']}")["end_reason"] == "released"


def test_an_administrator_may_do_everything_after_confirming_what_will_happen(
    page: Page, leases: Leases, server: ServerProcess
) -> None:
    _, bob, eve = leases
    use_token(page, ADMIN)
    expect(controls(page)).to_have_text(["End…", "End…", "✕", "Book…"])
    take_out = queue_of(page).get_by_role("button", name="Take out")
    cancel_and_confirm(server, take_out, "eve", eve["id"], yes="Take out")
    expect(queue_of(page)).to_contain_text("Nobody waits.")
    expect(page.get_by_role("alert")).to_contain_text(f"The request {eve['id']} of eve is out of the queue.")

    details = in_full(page, bob)
    drain = details.get_by_role("button", name="Drain GPU 1")
    cancel_and_confirm(server, drain, "GPU 1", "bob may keep", yes="Drain", Reason="a fan is broken")
    undrain = details.get_by_role("button", name="Put back")
    cancel_and_confirm(server, undrain, "GPU 1", yes="Put back")
    cancel_and_confirm(
        server, details.get_by_role("button", name="Drain the box"), "all GPUs of", yes="Drain", Reason="a move"
    )
    assert [gpu["is_out_of_service"] for gpu in server.json("/pool")["gpus"]] == [True, True]
    for gpu in (0, 1):
        in_full(page, gpu).get_by_role("button", name="Put back").click()
        confirm(page, "Put back")

    end = row(page, bob).get_by_role("button", name="End the lease")
    cancel_and_confirm(server, end, "GPU 1", "bob", bob["id"], "Nobody waits.", yes="End the lease", Reason="too long")
    expect(end).to_have_count(0)
    ended = server.json(f"/leases/{bob['id']}")
    assert (ended["end_reason"], ended["ended_by"], ended["end_note"]) == ("revoked", "admin", "too long")


def test_on_the_box_the_user_is_known_without_a_token(
    open_page: OpenPage, leases: Leases, server: ServerProcess
) -> None:
    page, me = open_page(), pwd.getpwuid(os.getuid()).pw_name
    mine = lease_of(server, owner=me)
    expect(page.get_by_role("banner")).to_contain_text(me)
    expect(page.get_by_text("You: 2nd of 2")).to_be_visible()
    own = waiters(page).filter(has_text=me)
    expect(own).to_have_attribute("data-mine", "true")
    own.get_by_role("button", name="Take out").click()
    confirm(page, "Take out")
    expect(own).to_have_count(0)
    assert server.json(f"/leases/{mine['id']}")["end_reason"] == "cancelled"


def test_what_does_not_succeed_is_told_and_one_can_log_out(
    page: Page, leases: Leases, server: ServerProcess, watch: Watch
) -> None:
    watch.allow("net::ERR_FAILED")
    use_token(page, ADMIN)
    dialog = dialog_of(row(page, leases[1]).get_by_role("button", name="End the lease"))
    page.context.route("**/revoke", lambda route: route.abort())
    dialog.get_by_role("button", name="End the lease", exact=True).click()
    expect(dialog.get_by_role("alert")).to_contain_text("cannot be reached")
    assert leases[1]["id"] in held(server)

    dialog.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Log out").click()
    expect(controls(page)).to_have_count(0)


def test_the_token_is_kept_for_the_tab_only(page: Page) -> None:
    use_token(page, ADA)
    expect(page.get_by_role("button", name="Log out")).to_be_visible()
    kept = page.evaluate(
        """async () => [
            {...sessionStorage}, {...localStorage}, document.cookie, location.href, history.state, window.name,
            document.documentElement.outerHTML, [...document.querySelectorAll("input")].map((input) => input.value),
            await indexedDB.databases(), await caches.keys(),
        ]"""
    )
    assert kept[0] == {"gpu-pool.token": ADA}
    assert ADA not in json.dumps(kept[1:])
    page.reload()
    expect(page.get_by_role("button", name="Log out")).to_be_visible()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("button", name="Log in…")).to_be_visible()
    assert page.evaluate("() => ({...sessionStorage})") == {}
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.get_by_role("button", name="Log in…")).to_be_visible()
