"""Waiting for a lease, signs of life, and the death of holders and waiters, over HTTP."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.client.backends.server_leases import ServerLeases
from gpu_worker_pool.client.endpoints.endpoint import Endpoint
from gpu_worker_pool.client.http.transport import Transport
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.errors import EndpointError
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.testing import ServerProcess
from tests.server.calls.leases.box import FIELDS, GPUS, NODE, T4
from tests.server.leasing import (
    LongPoll,
    a_process,
    assert_problem,
    eventually,
    get,
    held,
    new_id,
    put,
    queue,
    queued,
    release,
    renew,
    take,
)

# --- waiting ---------------------------------------------------------------------------------------------------------


def test_waiting_is_explained(server: ServerProcess) -> None:
    take(server, gpus=GPUS, owner="ann", worker_id="trainer")
    first = queue(server, owner="bob")
    second = queue(server, model=T4)

    assert first.keys() >= FIELDS
    assert (first["position"], second["position"]) == (1, 2)
    assert (first["gpus"], first["fence"], first["granted_at"], first["env"]) == ([], None, None, {})
    assert "Position 1 of 1" in first["reason"]
    assert "leased by ann" in first["reason"]
    assert "Position 2 of 2" in second["reason"]
    assert T4 in second["reason"]
    assert 55 < first["expires_in_s"] <= 60
    assert [(item["gpu_id"], item["node"], item["code"]) for item in first["obstacles"]] == [
        (0, NODE, "leased"),
        (1, NODE, "leased"),
        (2, NODE, "leased"),
    ]
    assert [item["code"] for item in second["obstacles"]] == ["wrong_model", "wrong_model", "leased"]
    assert all("leased by ann" in item["text"] for item in first["obstacles"])


def test_asking_with_patience(server: ServerProcess) -> None:
    """202 when `wait_s` is over, and when GPUs are set aside within it: the next call takes them up."""
    holder = take(server, gpus=GPUS)
    began = time.monotonic()
    assert queue(server, wait_s=0.3)["position"] == 1
    assert 0.3 <= time.monotonic() - began < 20

    release(server, queued(server)[0])
    patient = new_id()
    with LongPoll(server, f"/leases/{patient}", "PUT", b'{"wait_s": 25}') as poll:
        eventually(lambda: queued(server) == [patient], "it waits")
        release(server, holder["id"])
        told = poll.answer()
    assert (told.status, told.json["state"], told.json["position"]) == (202, "queued", 0)
    assert "ask again within" in told.json["reason"]
    again = put(server, patient)
    assert (again.status, again.json["state"]) == (200, "active")


def test_a_long_poll_ends_with_the_grant_or_with_its_time(server: ServerProcess) -> None:
    holder = take(server, gpus=GPUS)
    waiter = queue(server)
    began = time.monotonic()
    assert get(server, waiter["id"], wait_s=0.3)["state"] == "queued"
    assert 0.3 <= time.monotonic() - began < 20

    with LongPoll(server, f"/leases/{waiter['id']}?wait_s=25") as poll:
        poll.held()
        release(server, holder["id"])
        answer = poll.grant()
    assert answer.status == 200
    assert answer.json["state"] == "active"
    assert 55 < answer.json["expires_in_s"] <= 60, "its TTL begins when it is taken up"
    began = time.monotonic()
    assert get(server, waiter["id"], wait_s=25)["state"] == "active"
    assert time.monotonic() - began < 20


def test_a_grant_that_nobody_took_up_is_active_for_no_reader(server: ServerProcess) -> None:
    """A client that the server cannot identify at the moment must not believe in a GPU that may be withdrawn."""
    holder = take(server, gpus=GPUS)
    assert server.ask("/leases/waiter", "PUT", body={}).json["state"] == "queued"
    release(server, holder["id"])
    eventually(lambda: "waiter" in {lease["id"] for lease in server.json("/pool")["leases"]}, "it is granted")

    read = server.ask("/leases/waiter", headers={"X-Forwarded-For": "1.2.3.4"}).json
    assert (read["state"], read["position"], read["gpus"]) == ("queued", 0, [])
    assert server.ask("/leases/waiter").json["state"] == "active"
    assert server.ask("/leases/waiter", headers={"X-Forwarded-For": "1.2.3.4"}).json["state"] == "active"


# --- signs of life ---------------------------------------------------------------------------------------------------


async def test_the_ttl_of_a_holder_begins_when_the_server_answers_a_heartbeat_that_it_held(
    server: ServerProcess,
) -> None:
    lease_id, config = take(server)["id"], ClientConfig.build(service_endpoint=server.url)
    async with Transport() as transport:
        (url,) = config.endpoints.values()
        book = ServerLeases(Endpoint("box", url, transport, config))
        sent_at = boot_time()
        renewal = await book.renew([lease_id], wait_s=0.2)
        assert renewal.renewed == {lease_id}
        assert sent_at + 0.19 <= renewal.renewed_at <= boot_time()


async def test_a_holder_learns_whether_its_lease_is_wanted(server: ServerProcess) -> None:
    lease_id, config = take(server, gpus=GPUS)["id"], ClientConfig.build(service_endpoint=server.url)
    async with Transport() as transport:
        (url,) = config.endpoints.values()
        backend = ServerLeases(Endpoint("box", url, transport, config))
        assert not await backend.is_wanted(lease_id)
        queue(server)
        assert await backend.is_wanted(lease_id)
        with pytest.raises(EndpointError, match="There is no lease never-heard-of"):
            await backend.is_wanted("never-heard-of")


def test_a_lease_lives_as_long_as_it_is_renewed_and_then_goes_to_the_next(server: ServerProcess) -> None:
    holder = take(server, gpus=GPUS, ttl_s=0.8)["id"]
    waiter = queue(server)["id"]
    began = time.monotonic()
    while time.monotonic() - began < 1.3:
        answer = renew(server, holder)
        assert [item["id"] for item in answer["renewed"]] == [holder]
    assert held(server) == {holder}
    last_renewal = time.monotonic()

    assert get(server, waiter, wait_s=10)["state"] == "active"
    assert 0.6 < time.monotonic() - last_renewal < 8
    assert get(server, holder)["end_reason"] == "expired"
    assert renew(server, holder)["lost"] == [{"id": holder, "reason": "expired", "by": None, "note": None}]
    assert release(server, holder)["end_reason"] == "expired"


def test_looking_at_a_lease_that_is_held_is_no_renewal(server: ServerProcess) -> None:
    holder = take(server, ttl_s=0.5)["id"]

    ended = eventually(lambda: (lease := get(server, holder))["state"] == "ended" and lease, "it expires")
    assert isinstance(ended, dict)
    assert ended["end_reason"] == "expired"


def test_an_open_long_poll_is_a_sign_of_life(server: ServerProcess) -> None:
    take(server, gpus=GPUS)
    waiter = queue(server, ttl_s=0.6)["id"]
    asker = new_id("waiter")
    with (
        LongPoll(server, f"/leases/{waiter}?wait_s=1.5") as poll,
        LongPoll(server, f"/leases/{asker}", "PUT", b'{"ttl_s": 0.6, "wait_s": 1.5}') as asking,
    ):
        looked, asked = poll.answer(), asking.answer()
    assert looked.json["state"] == "queued"
    assert asked.status == 202
    assert asked.json["state"] == "queued"


def test_who_hung_up_while_waiting_does_not_keep_a_gpu_for_its_whole_ttl(server: ServerProcess) -> None:
    holder = take(server, gpus=GPUS)["id"]
    gone, patient = queue(server, gpus=GPUS)["id"], queue(server, gpus=GPUS)["id"]
    poll = LongPoll(server, f"/leases/{gone}?wait_s=25")
    # The server has read it when it answers what was sent after it.
    eventually(lambda: queued(server) == [gone, patient], "both wait")
    poll.close()
    release(server, holder)

    began = time.monotonic()
    assert get(server, patient, wait_s=20)["state"] == "active"
    assert time.monotonic() - began < 15


# --- processes -------------------------------------------------------------------------------------------------------


def facts_of(pid: int) -> dict[str, Any]:
    """What a client on the server's machine tells of a process, without its host's name."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    return {
        "pid": pid,
        "pid_started": float(stat.rpartition(")")[2].split()[19]),
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip(),
        "pid_namespace": str(Path("/proc/self/ns/pid").readlink()),
    }


@pytest.mark.parametrize("told", ["host and pid", "start time, boot and namespace"])
def test_the_death_of_a_holder_frees_at_once(server: ServerProcess, told: str) -> None:
    with a_process() as worker:
        who = facts_of(worker.pid) if "boot" in told else {"pid": worker.pid, "host": socket.gethostname()}
        holder = take(server, gpus=GPUS, ttl_s=3600, **who)
        assert holder["is_local"] is True
        assert holder["pid"] == worker.pid
        waiter = queue(server)["id"]
        with LongPoll(server, f"/leases/{waiter}?wait_s=25") as poll:
            poll.held()
            worker.kill()
            assert poll.grant().json["state"] == "active"
    assert get(server, holder["id"])["end_reason"] == "holder_died"
    assert renew(server, holder["id"])["lost"] == [
        {"id": holder["id"], "reason": "holder_died", "by": None, "note": None}
    ]


def test_the_death_of_a_waiter_takes_it_out_of_the_queue(server: ServerProcess) -> None:
    take(server, gpus=GPUS)
    with a_process() as worker:
        dying = queue(server, ttl_s=3600, pid=worker.pid, host=socket.gethostname())["id"]
        waiter = queue(server)["id"]
        worker.kill()
        eventually(lambda: queued(server) == [waiter], "the dead one leaves the queue", within_s=15)
    assert get(server, dying)["end_reason"] == "holder_died"


def test_a_process_that_does_not_run_is_refused(server: ServerProcess) -> None:
    with a_process() as worker:
        facts = facts_of(worker.pid)
        other_start = put(server, "dead", **{**facts, "pid_started": facts["pid_started"] - 1})
    assert_problem(other_start, 422, str(worker.pid), "not running")
    assert_problem(put(server, "dead", pid=worker.pid, host=socket.gethostname()), 422, str(worker.pid), "not running")
    assert_problem(put(server, "dead", **facts), 422, str(worker.pid))
    assert_problem(server.ask("/leases/dead"), 404)
