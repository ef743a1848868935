"""What can be done on the page: nothing without a token, and with one nothing without a confirmation that says what will happen."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from gpu_worker_pool.testing import ServerProcess
from tests.page.parts import card, controls, queue_of, use_token
from tests.page.watch import Watch
from tests.server.leasing import held, new_id, put, release_all

ADMIN, ADA = "the-token-of-admin", "the-token-of-ada"
Leases = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture(scope="module")
def server(browser: Browser) -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "2", "GPU_POOL_TOKENS": f"admin:{ADMIN},ada:{ADA}"}) as server:
        yield server


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


def cancel_and_confirm(
    server: ServerProcess, button: Locator, *named: str, yes: str, reason: str | None = None
) -> None:
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
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_be_hidden()
    dialog_of(button)
    button.page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert all_there_is() == before

    dialog = dialog_of(button)
    if reason is not None:
        dialog.get_by_label("Reason").fill(reason)
    dialog.get_by_role("button", name=yes, exact=True).click()
    expect(dialog).to_be_hidden()
    assert all_there_is() != before


def test_without_a_token_nothing_can_be_done_and_a_wrong_one_is_told(page: Page, leases: Leases, watch: Watch) -> None:
    expect(card(page, leases[0])).to_contain_text("ada")
    expect(queue_of(page)).to_contain_text("eve")
    expect(controls(page)).to_have_count(0)

    watch.allow("401")
    use_token(page, "no-such-token")
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("alert")).to_contain_text("token")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(controls(page)).to_have_count(0)


def test_who_is_not_admin_may_end_what_is_his(page: Page, leases: Leases, server: ServerProcess) -> None:
    ada, _, _ = leases
    use_token(page, ADA)
    expect(page.get_by_text("Token of ada")).to_be_visible()
    expect(controls(page)).to_have_count(1)
    cancel_and_confirm(server, card(page, ada).get_by_role("button", name="Release"), "ada", ada["id"], yes="Release")
    expect(controls(page)).to_have_count(0)
    assert server.json(f"/leases/{ada['id']}")["end_reason"] == "released"


def test_admin_may_do_everything_after_confirming_what_will_happen(
    page: Page, leases: Leases, server: ServerProcess
) -> None:
    ada, bob, eve = leases
    use_token(page, ADMIN)
    expect(controls(page)).to_have_count(2 * len(("Drain", "Release", "Revoke")) + len(("Take out",)))

    take_out = queue_of(page).get_by_role("button", name="Take out")
    cancel_and_confirm(server, take_out, "eve", eve["id"], yes="Take out")
    expect(queue_of(page)).to_contain_text("Nobody waits.")
    expect(queue_of(page)).to_be_focused()  # the button is gone; whoever is here by keyboard goes on from there

    drain = card(page, bob).get_by_role("button", name="Drain")
    cancel_and_confirm(server, drain, "GPU 1", "bob may keep it", yes="Drain", reason="a fan is broken")
    expect(card(page, bob)).to_contain_text("a fan is broken")

    undrain = card(page, bob).get_by_role("button", name="Put back")
    cancel_and_confirm(server, undrain, "GPU 1", yes="Put back")
    expect(card(page, bob)).not_to_contain_text("a fan is broken")

    release = card(page, ada).get_by_role("button", name="Release")
    cancel_and_confirm(server, release, "GPU 0", "ada", ada["id"], "Nobody waits.", yes="Release")
    expect(release).to_have_count(0)

    revoke = card(page, bob).get_by_role("button", name="Revoke")
    cancel_and_confirm(server, revoke, "GPU 1", "bob", bob["id"], "revoked", yes="Revoke")
    expect(revoke).to_have_count(0)
    assert server.json(f"/leases/{bob['id']}")["end_reason"] == "revoked"


def test_what_does_not_succeed_is_told_and_a_token_can_be_forgotten(
    page: Page, leases: Leases, server: ServerProcess, watch: Watch
) -> None:
    watch.allow("net::ERR_FAILED")
    use_token(page, ADMIN)
    dialog = dialog_of(card(page, leases[1]).get_by_role("button", name="Revoke"))
    page.context.route("**/revoke", lambda route: route.abort())
    dialog.get_by_role("button", name="Revoke", exact=True).click()
    expect(dialog.get_by_role("alert")).to_contain_text("cannot be reached")
    assert leases[1]["id"] in held(server)

    dialog.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Forget token").click()
    expect(controls(page)).to_have_count(0)
    expect(page.get_by_text(re.compile("Token of"))).to_be_hidden()


def test_the_token_is_nowhere_but_in_memory(page: Page, leases: Leases) -> None:
    use_token(page, ADMIN)
    expect(page.get_by_text("Token of admin")).to_be_visible()
    kept = page.evaluate(
        """async () => [
            {...localStorage}, {...sessionStorage}, document.cookie, location.href, history.state, window.name,
            document.documentElement.outerHTML, [...document.querySelectorAll("input")].map((input) => input.value),
            await indexedDB.databases(), await caches.keys(),
        ]"""
    )
    assert ADMIN not in json.dumps(kept)
    assert kept[:3] == [{}, {}, ""]
    assert ADMIN not in json.dumps(page.context.storage_state())

    page.reload()
    expect(card(page, leases[0])).to_contain_text("ada")
    expect(page.get_by_role("button", name="Token…")).to_be_visible()
    expect(controls(page)).to_have_count(0)
