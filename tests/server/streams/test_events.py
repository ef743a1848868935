"""GET /events: Server-Sent Events over a real connection."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.server.event_stream import Event, Stream
from tests.server.leasing import (
    OFTEN,
    get,
    queue,
    release,
    release_all,
    renew,
    take,
)

STREAMS = 256
STREAMS_OF_ONE = 64


@pytest.fixture(scope="module")
def running() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "1", "GPU_POOL_NODE": "box1", "LOG_LEVEL": "warning", **OFTEN}) as server:
        yield server


@pytest.fixture
def server(running: ServerProcess) -> Iterator[ServerProcess]:
    yield running
    release_all(running)


def about(lease_id: str, events: list[Event]) -> list[Event]:
    return [event for event in events if event.name.startswith("lease_") and event.data["lease_id"] == lease_id]


def test_the_life_of_a_lease_is_told_in_order(server: ServerProcess) -> None:
    with Stream(server) as stream:
        holder = take(server, owner="ann")["id"]
        waiter = queue(server, owner="bob", worker_id="w-1")
        release(server, holder)
        granted = get(server, waiter["id"], wait_s=10)
        release(server, waiter["id"])
        events = stream.until("lease_ended", waiter["id"])

    assert [event.name for event in about(holder, events)] == ["lease_granted", "lease_ended"]
    of_waiter = about(waiter["id"], events)
    assert [event.name for event in of_waiter] == ["lease_queued", "lease_granted", "lease_ended"]
    assert (of_waiter[0].data["owner"], of_waiter[0].data["worker_id"]) == ("bob", "w-1")
    assert of_waiter[1].data["gpus"] == of_waiter[2].data["gpus"] == granted["gpus"]
    assert of_waiter[2].data["reason"] == "released"
    told = [(event.name, event.data["lease_id"]) for event in events if event.name.startswith("lease_")]
    assert told.index(("lease_ended", holder)) < told.index(("lease_granted", waiter["id"]))


def test_what_ends_by_itself_is_told_too(server: ServerProcess) -> None:
    with Stream(server) as stream:
        lease = take(server, ttl_s=0.2)["id"]
        assert stream.until("lease_ended", lease)[-1].data["reason"] == "expired"
        gone = stream.until("gpu_drained")[-1].data
        assert (gone["lease_id"], gone["gpus"][0]["uuid"]) == (lease, server.json("/pool")["gpus"][0]["uuid"])


def test_what_the_operator_does_is_told(server: ServerProcess) -> None:
    uuid = server.json("/pool")["gpus"][0]["uuid"]
    with Stream(server) as stream:
        server.ask("/admin/gpus/0/drain", "POST", body={"reason": "dust"})
        server.ask("/admin/gpus/0/undrain", "POST")
        out, back = stream.until("gpu_out_of_service")[-1].data, stream.until("gpu_in_service")[-1].data
        assert (out["gpus"][0]["uuid"], out["reason"]) == (uuid, "dust")
        assert (back["gpus"], back["reason"]) == (out["gpus"], None)


# --- bounds ----------------------------------------------------------------------------------------------------------


def refused(streams: list[Stream]) -> list[str]:
    """What those were told that got no stream."""
    full = [stream.response for stream in streams if stream.response.status != 200]
    assert {response.status for response in full} <= {503}
    assert all(response.getheader("retry-after") for response in full)
    assert {response.getheader("content-type") for response in full} <= {"application/problem+json"}
    return [json.loads(response.read())["detail"] for response in full]


def test_streams_of_both_kinds_are_bounded_together_for_each_caller_and_for_all() -> None:
    kinds, names = ("/events", "/events?pace_s=60"), ("ada", "bob", "carol", "dave", "eve")
    settings = {
        "GPU_POOL_TOKENS": ",".join(f"{name}:the-secret-token-of-{name}" for name in names),
        "LOG_LEVEL": "error",
    }
    with ServerProcess({"SIMULATED_GPUS": "1", **settings, **OFTEN}) as server, ExitStack() as stack:

        def follow(name: str, number: int) -> list[Stream]:
            paths = [kinds[each % 2] for each in range(number)]
            return [
                stack.enter_context(Stream(server, path=path, token=f"the-secret-token-of-{name}")) for path in paths
            ]

        adas = follow("ada", STREAMS_OF_ONE + 2)
        told = f"{STREAMS_OF_ONE} streams of this caller are open already, which is the limit; poll /pool instead."
        assert refused(adas) == [told, told]
        assert refused([stream for name in names[1:4] for stream in follow(name, STREAMS_OF_ONE)]) == []
        # Four callers do not lock the others out: the oldest stream of one of them ends.
        [eves] = follow("eve", 1)
        assert eves.response.status == 200
        assert adas[0].response.read() == b"", "it has ended"
        told = f"{STREAMS} streams are open already, which is the limit; poll /pool instead."
        assert refused(follow("ada", 1)) == [told], "others have no more than ada"

        lease = take(server)["id"]
        for stream in (*adas[2:STREAMS_OF_ONE:16], eves):
            assert stream.until("lease_granted", lease)


def test_following_is_no_sign_of_life(server: ServerProcess) -> None:
    take(server)
    with Stream(server) as stream:
        waiter = queue(server, ttl_s=0.3)["id"]
        assert stream.until("lease_ended", waiter)[-1].data["reason"] == "expired"
    assert renew(server, waiter)["lost"] == [{"id": waiter, "reason": "expired", "by": None, "note": None}]
