"""Leases through crashes, stops, and journals that cannot be written."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.testing import ServerProcess
from tests.server.event_stream import Stream
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
    release_all,
    renew,
    take,
)
from tests.server.running import free_port


def content(server: ServerProcess) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    pool = server.json("/pool")
    # These depend on when it is asked.
    moving = dict.fromkeys(("expires_in_s", "expected_start_at", "expected_start_basis", "expected_after"))
    leases, queue = ([{**lease, **moving} for lease in pool[key]] for key in ("leases", "queue"))
    return leases, queue


@pytest.fixture(scope="module")
def with_one_gpu() -> Iterator[ServerProcess]:
    """It writes no log while its disk is full."""
    with ServerProcess({"SIMULATED_GPUS": "1", "LOG_LEVEL": "error"}) as server:
        yield server


@pytest.fixture
def server(with_one_gpu: ServerProcess) -> Iterator[ServerProcess]:
    """For tests that restart it or fill its disk, and leave it as it was."""
    yield with_one_gpu
    if with_one_gpu.process is None or with_one_gpu.process.poll() is not None:
        with_one_gpu.start()  # the test failed half-way
    eventually(lambda: with_one_gpu.json("/pool")["can_grant"], "it can write again")
    release_all(with_one_gpu)


# --- crashes ---------------------------------------------------------------------------------------------------------


def test_after_kill_9_everything_is_as_before() -> None:
    with ServerProcess({"SIMULATED_GPUS": "2"}) as server:
        ended = take(server)["id"]
        farewell = server.ask(f"/leases/{ended}", "DELETE")
        holder = put(server, new_id(), gpus=2, owner="ann", labels={"job": "x"}, ttl_s=60, wait_s=10).json
        assert holder["state"] == "active"
        first, second = queue(server, gpus=2)["id"], queue(server, gpus=2, worker_id="w")["id"]
        urgent = queue(server, priority=7)["id"]
        cancelled = queue(server)["id"]
        cancellation = server.ask(f"/leases/{cancelled}", "DELETE")
        before = content(server)
        assert [lease["id"] for lease in before[1]] == [urgent, first, second]
        server.restart()

        assert content(server) == before
        again = put(server, holder["id"], gpus=2, owner="ann", labels={"job": "x"}, ttl_s=60)
        assert (again.status, again.json["fence"], again.json["env"]) == (200, holder["fence"], holder["env"])
        assert put(server, first, gpus=2).status == 200
        assert_problem(put(server, first, gpus=1), 409)
        assert server.ask(f"/leases/{ended}", "DELETE").body == farewell.body
        assert server.ask(f"/leases/{cancelled}", "DELETE").body == cancellation.body
        assert renew(server, ended)["lost"] == [{"id": ended, "reason": "released", "by": user_name(), "note": None}]
        release(server, holder["id"])
        granted = get(server, urgent, wait_s=10)
        assert granted["state"] == "active"
        assert granted["fence"] > holder["fence"], "the fence goes on where it was"
        assert queued(server) == [first, second]


def test_after_a_restart_everybody_has_the_full_ttl(server: ServerProcess) -> None:
    take(server, "holder", ttl_s=4)
    queue(server, "waiter", ttl_s=4)

    def left_s() -> dict[str, float]:
        return {lease["id"]: lease["expires_in_s"] for lease in server.json("/leases")["leases"]}

    before = eventually(lambda: max(left_s().values()) < 3 and left_s(), "a second of it is over")
    assert isinstance(before, dict)
    server.restart()
    after = left_s()
    assert after.keys() == {"holder", "waiter"}
    assert all(after[lease] > before[lease] for lease in after)
    assert all(3 < left <= 4 for left in after.values())


def test_who_died_while_the_server_was_down_has_nothing_after_it() -> None:
    here = socket.gethostname()
    with (
        ServerProcess({"SIMULATED_GPUS": "2", "GPU_POOL_DURABILITY": "normal"}) as server,
        a_process() as dying,
        a_process() as living,
    ):
        lost = take(server, pid=dying.pid, host=here, ttl_s=3600)["id"]
        kept = take(server, pid=living.pid, host=here, ttl_s=3600)["id"]
        waiter, next_waiter = queue(server)["id"], queue(server)["id"]
        dead_waiter = queue(server, pid=dying.pid, host=here, ttl_s=3600)["id"]
        server.kill()
        dying.kill()
        dying.wait()
        server.start()

        assert get(server, waiter, wait_s=10)["state"] == "active"
        assert get(server, lost)["end_reason"] == "holder_died"
        eventually(lambda: queued(server) == [next_waiter], "the dead one leaves the queue")
        assert get(server, dead_waiter)["end_reason"] == "holder_died"
        assert held(server) == {kept, waiter}
        with LongPoll(server, f"/leases/{next_waiter}?wait_s=25") as poll:
            poll.held()
            living.kill()
            assert poll.grant().json["state"] == "active", "who lived on is still watched"


def test_a_waiter_that_never_calls_after_a_restart_keeps_its_place_and_no_gpu() -> None:
    with ServerProcess({"SIMULATED_GPUS": "1"}) as server:
        holder = take(server, ttl_s=600)["id"]
        silent, alive, last = (queue(server, ttl_s=600)["id"] for _ in range(3))
        server.restart()
        assert queued(server) == [silent, alive, last]
        with LongPoll(server, f"/leases/{alive}?wait_s=25") as poll:
            poll.held()
            release(server, holder)
            assert poll.grant().json["state"] == "active", "the silent one does not keep the GPU for its TTL"
        assert queued(server) == [silent, last]
        assert get(server, silent)["position"] == 1
        release(server, alive)
        assert get(server, silent, wait_s=10)["state"] == "active", "it called, and was the next in line"
        assert queued(server) == [last]


def test_two_servers_on_one_state_are_one_too_many(server: ServerProcess) -> None:
    lease = take(server)["id"]
    env = {**server.env, "PORT": str(free_port())}
    second = subprocess.run(
        server.command, env=env, cwd=server.folder, capture_output=True, text=True, timeout=30, check=False
    )

    said = second.stderr + second.stdout
    assert f"pid {server.pid}" in said
    assert "use that server, or stop it first" in said
    assert renew(server, lease)["lost"] == [], "the first one lives on"
    assert release(server, lease)["state"] == "ended"
    assert second.returncode not in {0, None}, "a start that failed is no success"
    assert "Traceback" not in said


# --- journals that cannot be used ------------------------------------------------------------------------------------


def server_on_a_damaged_journal() -> ServerProcess:
    server = ServerProcess({"SIMULATED_GPUS": "1", "GPU_POOL_NODE": "box1"})
    server.state_dir.mkdir()
    (server.state_dir / "simulated-box1.sqlite3").write_bytes(b"this is no database at all" * 1000)
    return server


@pytest.fixture(scope="module")
def damaged() -> Iterator[ServerProcess]:
    with server_on_a_damaged_journal() as server:
        yield server


def test_a_damaged_journal_is_set_aside_and_nothing_is_granted_until_somebody_has_looked() -> None:
    with server_on_a_damaged_journal() as server:
        (quarantined,) = server.state_dir.glob("*.damaged-*")
        assert quarantined.read_bytes().startswith(b"this is no database")
        detail = assert_problem(put(server, "a"), 503, "damaged", str(quarantined))
        assert "move" in detail, "it says what to do"
        server.restart()
        assert_problem(put(server, "a"), 503, "damaged", str(quarantined))
        assert list(server.state_dir.glob("*.damaged-*")) == [quarantined]

        quarantined.rename(server.state_dir.parent / "looked-at")
        eventually(lambda: put(server, "b").status in {200, 201}, "it goes on by itself")
        assert server.json("/health")["status"] == "healthy"


def test_gpu_seconds_count_from_the_start_of_the_server_so_that_a_restart_is_an_ordinary_reset(
    server: ServerProcess,
) -> None:
    def held_s() -> float:
        text = server.ask("/metrics").body.decode()
        found = re.search(r'^gpupool_gpu_seconds_total{owner="ada"} (\S+)$', text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    take(server, owner="ada", ttl_s=60)
    eventually(lambda: held_s() > 0.5, "half a second is counted")
    killed_at = time.monotonic()
    server.restart()
    assert held_s() < time.monotonic() - killed_at


def test_a_state_folder_that_cannot_be_made() -> None:
    server = ServerProcess({"SIMULATED_GPUS": "1"})
    server.state_dir.write_text("in the way", encoding="utf-8")
    with server:
        assert_problem(put(server, "a"), 503, str(server.state_dir))
        assert_problem(server.ask("/leases/renew", "POST", body={"ids": ["a"]}), 503, str(server.state_dir))
        assert server.json("/gpu/stats")["gpu_count"] == 1
        assert str(server.state_dir) in server.json("/pool")["trouble"]
        server.state_dir.unlink()
        eventually(lambda: put(server, "a").status in {200, 201}, "it goes on by itself")


def test_a_journal_that_is_deleted_while_it_is_in_use_is_written_again() -> None:
    with ServerProcess({"SIMULATED_GPUS": "2"}) as server:
        holder = take(server, gpus=2, owner="ann")["id"]
        waiter = queue(server)["id"]
        for path in server.state_dir.glob("*.sqlite3*"):
            if path.suffix != ".lock":
                path.unlink()

        new = eventually(lambda: put(server, "new").status in {200, 202}, "it is written again")
        assert new
        before = content(server)
        assert [lease["id"] for lease in (*before[0], *before[1])] == [holder, waiter, "new"]
        assert server.json("/health")["status"] == "healthy"
        server.restart()
        assert content(server) == before


# --- a full disk -----------------------------------------------------------------------------------------------------


@contextmanager
def full_disk(server: ServerProcess) -> Iterator[None]:
    """No file of the server's grows any more, which is what it sees of a disk that is full."""
    eventually(lambda: server.json("/pool")["gpus"], "the GPUs are known, so that one could be granted")
    _, hard = resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it may have been killed meanwhile
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))


def test_on_a_full_disk_nothing_is_granted_and_nobody_loses_anything() -> None:
    with ServerProcess({"SIMULATED_GPUS": "2", "LOG_LEVEL": "error"}) as server, a_process() as process:
        holder = take(server, ttl_s=60)["id"]
        dying = take(server, ttl_s=60, pid=process.pid, host=socket.gethostname())["id"]
        waiter = queue(server, ttl_s=60)["id"]
        with full_disk(server):
            refused = put(server, "new", ttl_s=60)
            assert_problem(refused, 503, "same id")
            assert "retry-after" in refused.headers
            assert_problem(put(server, "newer", wait_s=5), 503)
            assert_problem(server.ask(f"/leases/{holder}", "DELETE"), 503)
            assert_problem(server.ask("/admin/gpus/0/drain", "POST"), 503)

            answer = renew(server, holder, dying, waiter)
            assert [item["id"] for item in answer["renewed"]] == [holder, dying, waiter]
            assert [item["expires_in_s"] is None or item["expires_in_s"] > 58 for item in answer["renewed"]] == 3 * [
                True
            ]
            process.kill()
            process.wait()
            assert get(server, holder)["state"] == "active"
            assert get(server, waiter, wait_s=0.2)["state"] == "queued"
            pool = server.json("/pool")
            assert (pool["can_grant"], {lease["id"] for lease in pool["leases"]}) == (False, {holder, dying})
            assert [lease["id"] for lease in pool["queue"]] == [waiter]
            assert pool["trouble"]
            assert server.json("/health")["status"] == "degraded"
            assert server.json("/gpu/stats")["gpu_count"] == 2

        assert eventually(lambda: put(server, "new", ttl_s=60).status in {200, 202}, "it goes on by itself")
        assert get(server, waiter, wait_s=10)["state"] == "active", "what the dead one had"
        assert get(server, dying)["end_reason"] == "holder_died"
        assert queued(server) == ["new"]
        assert release(server, holder)["end_reason"] == "released"
        assert get(server, "new", wait_s=10)["state"] == "active"
        assert server.json("/health")["status"] == "healthy"
        before = content(server)
        server.restart()
        assert content(server) == before


def test_a_release_that_could_not_be_written_has_not_happened(server: ServerProcess) -> None:
    holder = take(server, ttl_s=60)
    waiter = queue(server, ttl_s=60)["id"]
    with full_disk(server):
        assert_problem(server.ask(f"/leases/{holder['id']}", "DELETE"), 503)
        for _ in range(20):
            answer = server.ask(f"/leases/{waiter}?wait_s=0.05")
            assert answer.status == 503 or answer.json["state"] == "queued", "nobody is shown what is not written"
        server.kill()
    server.start()
    assert get(server, holder["id"])["fence"] == holder["fence"]
    assert held(server) == {holder["id"]}
    assert queued(server) == [waiter]
    assert release(server, holder["id"])["end_reason"] == "released"
    assert get(server, waiter, wait_s=10)["fence"] > holder["fence"]


def test_a_lease_that_could_not_be_written_is_not_renewed(server: ServerProcess) -> None:
    """A caller that was told 503 has nothing, so no caller may be told that it has it still."""
    new = new_id()
    with full_disk(server):
        assert_problem(put(server, new, ttl_s=60), 503)
        answer = server.ask("/leases/renew", "POST", body={"ids": [new]})
        assert answer.status == 503 or answer.json["renewed"] == [], answer


def test_a_lease_whose_caller_was_told_503_and_does_not_ask_again_ends(server: ServerProcess) -> None:
    """The server's own process would hold it for ever: only the 503 ends it."""
    new = new_id()
    with full_disk(server):
        answer = put(server, new, ttl_s=0.2, pid=server.pid, host=socket.gethostname())
        assert_problem(answer, 503, "may have been recorded", "same id", "not requested again ends")
    eventually(lambda: server.json("/pool")["can_grant"], "it is written after all")
    eventually(lambda: new not in held(server), "it ends by itself")
    ended = get(server, new)
    assert (ended["end_reason"], ended["ended_by"]) == ("released", "the server")
    assert "503" in ended["end_note"]


def test_a_lease_that_could_not_be_written_is_shown_nowhere(server: ServerProcess) -> None:
    new = new_id()
    with full_disk(server):
        assert_problem(put(server, new, ttl_s=60), 503)
        pool = server.json("/pool")
        assert (pool["leases"], pool["queue"], server.json("/leases")["leases"]) == ([], [], [])
        assert pool["gpus"][0]["leases"] == []


# --- stopping --------------------------------------------------------------------------------------------------------


def test_waiters_are_answered_before_the_server_stops() -> None:
    with ServerProcess({"SIMULATED_GPUS": "1", "GPU_POOL_MAX_WAITING": "20"}) as server, ExitStack() as stack:
        take(server, "holder")
        waiter = queue(server)["id"]
        path = f"/leases/{waiter}?wait_s=120"
        polls = [stack.enter_context(LongPoll(server, path)) for _ in range(19)]
        asker = new_id()
        polls.append(stack.enter_context(LongPoll(server, f"/leases/{asker}", "PUT", b'{"wait_s": 120}')))
        streams = [stack.enter_context(Stream(server)) for _ in range(5)]
        eventually(lambda: b"\ngpupool_waiting_connections 20.0\n" in server.ask("/metrics").body, "all of them wait")
        began = time.monotonic()
        os.kill(server.pid, signal.SIGTERM)

        answers = [poll.answer() for poll in polls]
        assert [answer.status for answer in answers] == [200] * 19 + [202]
        assert {answer.json["state"] for answer in answers} == {"queued"}
        for stream in streams:
            while stream.response.readline():
                pass  # until its end; one that was cut off raises
        assert server.process is not None
        server.process.wait(timeout=20)
        assert time.monotonic() - began < 15
        assert server.process.returncode in {0, -signal.SIGTERM}
        assert "Traceback" not in server.log()
        server.start()
        assert queued(server) == [waiter, asker]
