"""A box that does not lead passes calls on to the leader, as they came."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gpu_worker_pool.core.model.configured import Role
from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.core.model.lease import ActiveLease
from gpu_worker_pool.host.clock import boot_id
from gpu_worker_pool.host.identity import pid_namespace
from gpu_worker_pool.server.http.access import Caller
from gpu_worker_pool.server.http.forwarded import HEADER, Forwarded
from tests.listener import Listener
from tests.server.fleet.two_boxes import KEY, LEADER, OTHER, TwoBoxes, two_boxes, until

ADMIN, ADA = ({"Authorization": f"Bearer the-secret-of-{name}"} for name in ("admin", "ada"))


def said(**parts: Any) -> dict[str, str]:
    return {HEADER: Forwarded(**{"key": KEY, "node": OTHER, **parts}).header()}


def own_process() -> dict[str, Any]:
    return {"pid": os.getpid(), "boot_id": boot_id(), "pid_namespace": pid_namespace()}


async def wait_for_waiting(boxes: TwoBoxes, number: int) -> None:
    await until(lambda: boxes.leader.app.pool.waiting == number)


async def test_calls_come_back_as_the_leader_answers_them(tmp_path: Path) -> None:
    async with two_boxes(tmp_path) as boxes:
        await boxes.read_the_other()
        leader, other = boxes.leader, boxes.other
        # A grant, with the process that the box found.
        status, lease = await other.ask("/leases/a?devices=uuid", "PUT", {"gpus": 1, **own_process()})
        assert (status, lease["state"], lease["is_local"]) == (201, "active", True)
        assert lease["gpus"][0]["node"] == OTHER
        assert lease["wishes"]["node"] == OTHER
        held = leader.app.pool.state.leases["a"]
        assert (held.request.holder.node, held.request.holder.process and held.request.holder.process.pid) == (
            OTHER,
            os.getpid(),
        )
        # What is wrong with a call, the leader says, with its status and its headers.
        assert (await other.ask("/leases/x", "PUT", {"gpus": "many"}))[0] == 422
        assert (await other.ask("/leases/unheard-of"))[0] == 404
        assert (await other.ask("/leases/b", "PUT", {**own_process(), "pid": 4_194_301}))[0] == 422
        assert (await other.ask("/quotas/ada", "PUT", {"gpus": 2}, ADA))[0] == 403
        assert (await other.ask("/leases/c", "PUT", {}, {"Authorization": "Bearer wrong-token"}))[0] == 401
        assert "www-authenticate" in other.answered
        assert (await other.ask("/leases/c", "PUT", {}, {"Origin": "http://elsewhere.example"}))[0] == 403
        # By token, as the leader knows it.
        status, lease = await other.ask("/leases/d", "PUT", {}, ADA)
        assert (status, lease["owner"], lease["is_local"]) == (201, "ada", False)
        assert (await other.ask("/leases/d", "DELETE", headers=ADA))[0] == 200
        assert (await other.ask("/leases/a", "HEAD"))[0] == 200
        assert int(other.answered["content-length"]) > 0
        assert (await other.ask("/ui/data/me", headers=ADMIN))[1] == {
            "name": "admin",
            "is_admin": True,
            "role": "administrator",
        }
        # These the box answers itself.
        assert (await other.ask("/gpu/count"))[1]["gpu_count"] == 2
        assert (await other.ask("/livez"))[0] == 200


async def test_a_token_that_is_added_at_one_box_holds_at_all(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"the-secret-of-olga").hexdigest()
    olga = {"Authorization": "Bearer the-secret-of-olga"}
    async with two_boxes(tmp_path) as boxes:
        leader, other = boxes.leader, boxes.other
        form = {"name": "olga", "role": "operator"}
        assert (await other.ask(f"/admin/tokens/{digest}", "PUT", form, ADA))[0] == 403
        assert (await other.ask(f"/admin/tokens/{digest}", "PUT", form, ADMIN))[0] == 200

        for box in (leader, other):
            assert (await box.ask("/ui/data/me", headers=olga))[1]["role"] == "operator"
            assert (await box.ask("/quotas/ada", "PUT", {"gpus": 2}, olga))[0] == 403
        assert (await other.ask("/leases/of-ada", "PUT", {}, ADA))[0] == 201
        renewed = await other.ask("/leases/renew", "POST", {"ids": ["of-ada"]}, olga)
        assert (renewed[0], [each["id"] for each in renewed[1]["renewed"]]) == (200, ["of-ada"])

        assert (await leader.ask(f"/admin/tokens/{digest}", "DELETE", headers=ADMIN))[0] == 200
        assert (await other.ask("/leases/of-olga", "PUT", {}, olga))[0] == 401


def test_what_a_box_says_of_a_caller_is_read_as_it_was_said() -> None:
    for said in (
        Forwarded(KEY, OTHER, Caller("ölga", is_local=True, role=Role.OPERATOR), uid=7, process=ProcessId(5, 8.0)),
        Forwarded(KEY, OTHER, denied=(401, "why"), no_process=(403, "whose"), is_loopback=True, host="10.0.0.1"),
    ):
        assert said.header().isascii()
        assert Forwarded.read(said.header()) == said


async def test_a_long_poll_and_a_stream_pass_through_and_end_with_their_caller(tmp_path: Path) -> None:
    async with two_boxes(tmp_path) as boxes:
        await boxes.read_the_other(gpus=1)
        other = boxes.other
        assert (await other.ask("/leases/holder", "PUT", {"among": ["0"]}))[0] == 201
        waiting = asyncio.ensure_future(other.ask("/leases/waiter", "PUT", {"among": ["0"], "wait_s": 60}))
        await wait_for_waiting(boxes, 1)
        waiting.cancel()
        await wait_for_waiting(boxes, 0)
        assert "waiter" in boxes.leader.app.pool.state.leases, "it keeps its place; its caller may come back"
        async with other.session.get(f"{other.url}/events") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert b"connected" in await stream.content.readany()
            await other.ask("/leases/waiter", "DELETE")
            told = b""
            while b"lease_ended" not in told:
                told += await stream.content.readany()
        await until(lambda: not boxes.leader.app._streams._followers)


async def test_only_a_box_with_the_leaders_key_is_believed(tmp_path: Path) -> None:
    headers = (
        "",
        "{}",
        "nonsense",
        Forwarded("a wrong key", OTHER).header(),
        Forwarded(KEY, LEADER).header(),
        json.dumps({**json.loads(Forwarded(KEY, OTHER).header()), "process": "all"}),
    )
    async with two_boxes(tmp_path) as boxes:
        for header in headers:
            for path in ("/leases/x", "/fleet/leases/x"):
                status, problem = await boxes.leader.ask(path, "PUT", {}, {HEADER: header})
                assert (status, "leave it out" in problem["detail"]) == (403, True)
        assert not boxes.leader.app.pool.state.leases
        boxes.leader.app.pool.membership = None
        assert (await boxes.leader.ask("/pool", headers=said()))[0] == 403, "a server without a fleet believes no box"
        status, problem = await boxes.leader.ask("/fleet/pool")
        assert (status, "belongs to no fleet" in problem["detail"]) == (404, True)


async def test_a_caller_is_told_to_ask_again_while_the_leader_has_given_its_box_up(tmp_path: Path) -> None:
    async with two_boxes(tmp_path) as boxes:
        boxes.leader.membership.keys.clear()
        for path, method, body in (
            ("/leases/x", "PUT", {}),
            ("/leases/renew", "POST", {"ids": ["x"]}),
            ("/pool", "GET", None),
        ):
            status, problem = await boxes.other.ask(path, method, body)
            assert (status, "ask again" in problem["detail"].lower()) == (503, True), problem
            assert boxes.other.answered["retry-after"] == "1"


async def test_what_a_box_says_of_its_caller_is_what_counts(tmp_path: Path) -> None:
    async with two_boxes(tmp_path) as boxes:
        leader = boxes.leader
        denied = said(denied=(401, "Send a token."))
        assert (await leader.ask("/leases/x", "PUT", {}, denied))[0] == 401
        assert (await leader.ask("/leases/x", "PUT", {}, said()))[0] == 401, "no caller and no token"
        foreign = said(caller=None, no_process=(403, "It is another user's."))
        assert (await leader.ask("/leases/x", "PUT", {}, {**foreign, **ADA}))[0] == 403
        assert not leader.app.pool.state.leases


async def test_a_box_vouches_only_for_a_process_that_a_caller_of_its_machine_may_name(tmp_path: Path) -> None:
    async with two_boxes(tmp_path) as boxes:
        for number, (headers, process) in enumerate(
            ((ADA, os.getpid()), ({**ADA, "X-Forwarded-For": "10.0.0.7"}, None))
        ):
            await boxes.other.ask(f"/leases/{number}", "PUT", own_process(), headers)
            lease = boxes.leader.app.pool.state.find(str(number))
            assert lease is not None
            found = lease.request.holder.process_on(OTHER)
            assert (found and found.pid) == process, headers


async def test_no_call_is_passed_on_twice_and_without_a_leader_the_reason_is_told(tmp_path: Path) -> None:
    async with two_boxes(tmp_path) as boxes:
        leader, other = boxes.leader, boxes.other
        # Each takes the other for the leader.
        leader.membership.is_leader = False
        leader.membership.leader_url, leader.membership.key = other.url, "some key"
        status, problem = await other.ask("/pool")
        assert (status, other.answered["retry-after"]) == (503, "1")
        assert "does not lead" in problem["detail"]
        other.membership.leader_url, other.membership.trouble = None, "the leader does not take this box: wrong key"
        status, problem = await other.ask("/leases/x", "PUT", {})
        assert (status, "wrong key" in problem["detail"]) == (503, True)
        other.membership.leader_url = "http://127.0.0.1:9"
        status, problem = await other.ask("/leases/x", "PUT", {})
        assert (status, "cannot be reached" in problem["detail"]) == (503, True)
        # A wait ends when another box leads.
        leader.membership.is_leader, other.membership.leader_url = True, leader.url
        for name in ("one", "two"):
            assert (await other.ask(f"/leases/{name}", "PUT", {}))[0] == 201
        waiting = asyncio.ensure_future(other.ask("/leases/waiter", "PUT", {"wait_s": 60}))
        await wait_for_waiting(boxes, 1)
        other.membership.leader_url = "http://127.0.0.1:9"
        assert (await waiting)[0] == 502


@asynccontextmanager
async def leader_that_falls_silent(said: bytes) -> AsyncIterator[tuple[str, asyncio.Queue[None]]]:
    """A leader that is stopped in the midst of each answer, after this part of it; and a note for each such answer."""
    fell_silent: asyncio.Queue[None] = asyncio.Queue()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + said)
        fell_silent.put_nowait(None)
        while await reader.read(65536):
            pass

    listener = Listener(answer)
    listener.start()
    try:
        yield f"http://127.0.0.1:{listener.port}", fell_silent
    finally:
        await listener.stop()


async def test_a_call_ends_if_its_leader_falls_silent_in_the_midst_of_the_answer(tmp_path: Path) -> None:
    async with (
        two_boxes(tmp_path) as boxes,
        leader_that_falls_silent(b'Content-Length: 99\r\n\r\n{"id":') as (url, fell_silent),
    ):
        for path, method, body, status in (
            ("/leases/x", "PUT", {}, 502),
            ("/leases/x", "DELETE", None, 502),
            ("/leases/renew", "POST", {"ids": ["x"]}, 503),
        ):
            boxes.other.membership.leader_url = url
            asking = asyncio.ensure_future(boxes.other.ask(path, method, body))
            await fell_silent.get()
            # The agent of the box has noticed.
            boxes.other.membership.leader_url = None
            answered, problem = await asking
            assert (answered, "again" in problem["detail"]) == (status, True), problem
            assert boxes.other.answered["retry-after"] == "1"


async def test_a_stream_ends_with_the_leadership_of_the_box_that_it_comes_from(tmp_path: Path) -> None:
    async with (
        two_boxes(tmp_path) as boxes,
        leader_that_falls_silent(b"Transfer-Encoding: chunked\r\n\r\n2\r\n: \r\n") as (url, _),
    ):
        boxes.other.membership.leader_url = url
        async with boxes.other.session.get(f"{boxes.other.url}/events") as stream:
            assert await stream.content.readany() == b": "
            boxes.other.membership.leader_url = boxes.leader.url
            assert await stream.content.readany() == b""


async def test_a_leader_that_is_silent_keeps_no_renewal_of_the_boxes_own_leases(tmp_path: Path) -> None:
    async with (
        two_boxes(tmp_path) as boxes,
        leader_that_falls_silent(b"Content-Length: 99\r\n\r\n{") as (url, _),
    ):
        other = boxes.other
        # Nobody has noticed yet that the leader is silent.
        other.membership.leader_url, other.membership.kept = url, {"mine": None}
        for wait_s in (0, 0.01):
            status, answer = await other.ask("/leases/renew", "POST", {"ids": ["mine", "far"], "wait_s": wait_s})
            assert (status, [each["id"] for each in answer["renewed"]], answer["lost"]) == (200, ["mine"], [])


async def test_a_grant_that_its_box_does_not_confirm_ends_unless_its_client_asks_again(tmp_path: Path) -> None:
    async with two_boxes(tmp_path) as boxes:
        pool, confirmed = boxes.leader.app.pool, False

        async def confirm(_: str, __: float) -> bool:
            return confirmed

        pool.confirmed = confirm
        # No TTL runs against a process of the box.
        for name in ("claimed", "forgotten"):
            status, problem = await boxes.leader.ask(f"/leases/{name}", "PUT", {"ttl_s": 1.0, **own_process()})
            assert (status, "ask again with the same id" in problem["detail"]) == (503, True)
        confirmed = True
        assert (await boxes.leader.ask("/leases/claimed"))[1]["state"] == "active"
        await until(lambda: not isinstance(pool.state.find("forgotten"), ActiveLease))
        status, lease = await boxes.leader.ask("/leases/forgotten")
        assert (lease["end_reason"], lease["ended_by"]) == ("released", "the server")
        assert isinstance(pool.state.find("claimed"), ActiveLease)
