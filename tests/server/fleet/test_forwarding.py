"""A box that does not lead passes calls on to the leader, as they came."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from gpu_worker_pool.core.model.configured import Role
from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.core.model.lease import ActiveLease
from gpu_worker_pool.host.clock import boot_id
from gpu_worker_pool.host.processes import pid_namespace
from gpu_worker_pool.server.http.access import Caller
from gpu_worker_pool.server.http.forwarded import Forwarded
from tests.server.fleet.two_boxes import OTHER, TwoBoxes, linked, never, two_boxes, until

ADMIN, ADA = ({"Authorization": f"Bearer the-secret-of-{name}"} for name in ("admin", "ada"))


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
        async with other.answering("/events") as (_, stream):
            assert other.answered["content-type"].startswith("text/event-stream")
            assert b"connected" in await stream.read(65536)
            await other.ask("/leases/waiter", "DELETE")
            told = b""
            while b"lease_ended" not in told:
                told += await stream.read(65536)
        await until(lambda: not boxes.leader.app._streams._followers)


async def test_what_a_box_says_of_its_caller_counts_on_its_link_and_nowhere_else(tmp_path: Path) -> None:
    async with two_boxes(tmp_path) as boxes:
        link = boxes.other.membership.leader
        assert link is not None

        async def put(said: Forwarded, **form: object) -> int:
            answer = link.ask("PUT", "/leases/x", said=said.encoded(), body=json.dumps(form).encode())
            return (await answer.begun).status

        token = hashlib.sha256(b"the-secret-of-ada").hexdigest()
        for refused, status in (
            (Forwarded(denied=(401, "Send a token.")), 401),
            (Forwarded(), 401),
            (Forwarded(token="0" * 64), 401),
            (Forwarded(token=token, no_process=(403, "It is another user's.")), 403),
        ):
            assert await put(refused) == status, refused
        header = {"gpu-pool-forwarded": Forwarded(caller=Caller("root", role=Role.ADMINISTRATOR)).encoded()}
        assert (await boxes.leader.ask("/admin/tokens/1", "PUT", {}, {**header, **ADA}))[0] == 403
        assert not boxes.leader.app.pool.state.leases
        assert await put(Forwarded(caller=Caller("ölga", is_local=True), uid=7, process=ProcessId(5, 8.0))) == 201
        held = boxes.leader.app.pool.state.leases["x"].request.holder
        assert (held.owner, held.node, held.process) == ("ölga", OTHER, ProcessId(5, 8.0))
        # Nothing of a token passes on the link but its digest.
        asking = asyncio.ensure_future(boxes.other.ask("/leases/y", "PUT", {}, ADA))
        frame = await boxes.connection.next_sent()
        asking.cancel()
        assert token.encode() in frame
        assert b"the-secret-of-ada" not in frame


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
        leader.membership.is_leader = False
        status, problem = await other.ask("/pool")
        assert (status, other.answered["retry-after"]) == (503, "1")
        assert "does not lead" in problem["detail"]
        boxes.pass_to(None)
        other.membership.trouble = "the leader does not take this box: wrong key"
        status, problem = await other.ask("/leases/x", "PUT", {})
        assert (status, "wrong key" in problem["detail"]) == (503, True)


async def test_calls_and_streams_end_with_the_link(tmp_path: Path) -> None:
    async with two_boxes(tmp_path) as boxes:
        other = boxes.other
        for name in ("one", "two"):
            assert (await other.ask(f"/leases/{name}", "PUT", {}))[0] == 201
        async with other.answering("/events") as (_, stream):
            await stream.read(65536)
            waiting = asyncio.ensure_future(other.ask("/leases/waiter", "PUT", {"wait_s": 60}))
            await wait_for_waiting(boxes, 1)
            boxes.connection.close()
            status, problem = await waiting
            assert (status, "make the same call again" in problem["detail"]) == (502, True)
            assert other.answered["retry-after"] == "1"
            while await stream.read(65536):
                pass
        await wait_for_waiting(boxes, 0)
        status, problem = await other.ask("/leases/renew", "POST", {"ids": ["elsewhere"]})
        assert (status, "again" in problem["detail"]) == (503, True)


async def test_a_leader_that_is_silent_keeps_no_renewal_of_the_boxes_own_leases(tmp_path: Path) -> None:
    async with two_boxes(tmp_path) as boxes, linked(never) as (silent, _, _):
        other = boxes.other
        # Nobody has noticed yet that the leader is silent.
        boxes.pass_to(silent)
        other.membership.kept = {"mine": None}
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
