"""Bookings and planned drains over HTTP. Their rule is in tests/core/queue/test_bookings.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.testing import ServerProcess
from tests.server.calls.test_lease_access import ADMIN, ALICE, BOB, TOKENS, bearer
from tests.server.leasing import OFTEN, assert_problem, gpu_states, queue, release_all, take, wait_until_free

HOUR_S = 3600.0
AS_ADMIN = bearer(ADMIN)


@pytest.fixture(scope="module")
def running() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "2xA100-80GB,1xT4", "GPU_POOL_TOKENS": TOKENS, **OFTEN}) as server:
        yield server


@pytest.fixture
def server(running: ServerProcess) -> Iterator[ServerProcess]:
    yield running
    for booking in bookings(running):
        running.ask(f"/bookings/{booking['id']}", "DELETE", AS_ADMIN)
    for quota in running.json("/quotas")["quotas"]:
        running.ask(f"/quotas/{quota['owner']}", "DELETE", AS_ADMIN)
    for index in range(3):
        running.ask(f"/admin/gpus/{index}/undrain", "POST", AS_ADMIN)
    release_all(running, AS_ADMIN)


def bookings(server: ServerProcess) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = server.json("/bookings")["bookings"]
    assert listed == server.json("/pool")["bookings"]
    return listed


def at(hours: float) -> str:
    """This number of hours from now."""
    return iso_time(time.time() + hours * HOUR_S) or ""


def form(starts: float = 24, ends: float = 26, **more: Any) -> dict[str, Any]:
    return {"starts_at": at(starts), "ends_at": at(ends), **more}


def book(server: ServerProcess, booking_id: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.ask(f"/bookings/{booking_id}", "PUT", AS_ADMIN, body)
    assert answer.status == 200, answer
    found: dict[str, Any] = answer.json
    return found


def test_gpus_are_booked_shown_and_cancelled(server: ServerProcess) -> None:
    asked = form(owner="ada", gpus=2, model="A100", reason="a course")
    booked = book(server, "course", asked)

    assert [gpu["gpu_id"] for gpu in booked["gpus"]] == [0, 1]
    assert (booked["owner"], booked["reason"], booked["booked_by"]) == ("ada", "a course", "admin")
    assert (booked["starts_at"], booked["ends_at"]) == (asked["starts_at"], asked["ends_at"])
    assert bookings(server) == [booked]
    assert book(server, "course", asked) == booked, "repeating it is harmless"
    assert gpu_states(server) == ["free", "free", "free"], "a request without a limit will have ended by tomorrow"
    book(server, "course", {**asked, "starts_at": at(0.5)})
    assert gpu_states(server) == ["held", "held", "free"]
    assert "booked for ada (a course)" in queue(server, owner="bob", model="A100")["reason"]
    assert take(server, owner="bob", model="A100", time_limit_s=HOUR_S / 3)["gpus"][0]["gpu_id"] in {0, 1}

    left = server.ask("/bookings/course", "DELETE", AS_ADMIN)
    assert (left.status, left.json["bookings"]) == (200, [])
    assert_problem(server.ask("/bookings/course", "DELETE", AS_ADMIN), 404, "course")


@pytest.mark.parametrize(
    ("changed", "status", "word"),
    [
        ({"ends_at": at(23)}, 422, "would end before it begins"),
        ({"starts_at": at(-3), "ends_at": at(-2)}, 422, "its end is in the past"),
        ({"starts_at": "soon"}, 422, "starts_at"),
        ({"ends_at": None}, 422, "ends_at"),
        ({"gpus": 4}, 422, "this box has 3 GPUs"),
        ({"gpus": 2, "model": "T4"}, 422, "this box has 1 such GPU"),
        ({"gpus": 0}, 422, "gpus"),
        ({"among": ["7"]}, 422, "7"),
        ({"owner": "a\nb"}, 422, "owner"),
        ({"reason": "x" * 300}, 422, "reason"),
        ({"for": "4h"}, 422, "for"),
    ],
)
def test_a_bad_booking_changes_nothing_and_is_told_what_is_wrong(
    server: ServerProcess, changed: dict[str, Any], status: int, word: str
) -> None:
    body = {**form(), **changed}
    assert_problem(server.ask("/bookings/bad", "PUT", AS_ADMIN, body), status, word)
    assert_problem(server.ask("/bookings/a%20b", "PUT", AS_ADMIN, form()), 422)
    assert_problem(server.ask("/bookings/drain-GPU-1", "PUT", AS_ADMIN, form()), 422, "planned drains")
    assert bookings(server) == []


def test_a_caller_books_for_itself_within_its_quota(server: ServerProcess) -> None:
    def ask(booking_id: str, token: str, **more: Any) -> Any:
        return server.ask(f"/bookings/{booking_id}", "PUT", bearer(token), {**same, **more})

    same = form()
    assert_problem(ask("mine", ALICE), 403, "alice has no quota")
    server.ask("/quotas/alice", "PUT", AS_ADMIN, {"gpus": 2})

    assert ask("mine", ALICE, gpus=2).json["owner"] == "alice"
    assert ask("mine", ALICE, gpus=2).status == 200, "it does not count against itself"
    assert_problem(ask("more", ALICE), 403, "of which 2 are booked at that time")
    assert ask("later", ALICE, gpus=2, **form(30, 31)).status == 200, "that is another time"
    server.ask("/bookings/later", "DELETE", bearer(ALICE))
    assert_problem(ask("far", ALICE, **form(24 * 6.9, 24 * 7.1)), 403, "7d ahead")
    assert_problem(ask("mine", ALICE, owner="bob"), 403, "only an operator or an administrator")
    assert_problem(ask("mine", BOB), 403)
    server.ask("/quotas/bob", "PUT", AS_ADMIN, {"gpus": 2})
    assert_problem(ask("mine", BOB), 403, "is not yours")
    assert_problem(server.ask("/bookings/mine", "DELETE", bearer(BOB)), 403, "alice")
    assert_problem(server.ask("/bookings/mine", "DELETE", {"X-Forwarded-For": "1.2.3.4"}), 401)
    assert [booking["id"] for booking in bookings(server)] == ["mine"]

    assert server.ask("/bookings/mine", "DELETE", bearer(ALICE)).json["bookings"] == []


# --- planned drains --------------------------------------------------------------------------------------------------


def test_a_planned_drain_is_shown_and_undrain_cancels_it(server: ServerProcess) -> None:
    server.ask(f"/leases/{take(server)['id']}", "DELETE", AS_ADMIN)
    wait_until_free(server)
    planned = server.ask("/admin/gpus/2/drain", "POST", AS_ADMIN, {"at": at(0.5), "reason": "new fans"})

    # The last lease was short, so one without a limit will have ended.
    assert (planned.status, planned.json["is_out_of_service"], planned.json["state"]) == (200, False, "free")
    (booking,) = bookings(server)
    assert (booking["owner"], booking["ends_at"], booking["reason"]) == (None, None, "new fans")
    assert [gpu["gpu_id"] for gpu in booking["gpus"]] == [2]
    assert_problem(server.ask("/bookings/" + booking["id"], "DELETE", bearer(ALICE)), 403, "maintenance")

    back = server.ask("/admin/gpus/2/undrain", "POST", AS_ADMIN)
    assert (back.json["state"], bookings(server)) == ("free", [])


def test_bookings_and_planned_drains_are_there_after_a_crash() -> None:
    with ServerProcess({"SIMULATED_GPUS": "3"}) as server:
        server.ask("/bookings/course", "PUT", body=form(owner="ada", gpus=2))
        server.ask("/bookings/gone", "PUT", body=form(30, 31))
        server.ask("/bookings/gone", "DELETE")
        server.ask("/admin/gpus/2/drain", "POST", body={"at": at(30), "reason": "new fans"})
        before = bookings(server)
        assert len(before) == 2
        server.restart()

        assert bookings(server) == before
