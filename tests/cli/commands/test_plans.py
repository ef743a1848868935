"""`quota`, `group`, `reserve`, `drain --at`, `drain --wait` and `release --mine` at a real server with tokens."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.testing import ServerProcess
from tests.cli.in_process import called
from tests.cli.own_process import GPU_POOL, Done, environment, start_gpu_pool
from tests.cli.terminal import Terminal
from tests.client.entry_points import EntryPoint
from tests.client.foreign_servers import Behaviour, ForeignServer, internal_error, not_found, statistics
from tests.server.leasing import OFTEN, get, new_id, queue, release, release_all, take
from tests.server.running import free_port

ADA, ADMIN = "the-secret-of-ada", "the-secret-of-admin"
AS_ADMIN = {"Authorization": f"Bearer {ADMIN}"}


@pytest.fixture(scope="module")
def running() -> Iterator[ServerProcess]:
    with ServerProcess({**OFTEN, "SIMULATED_GPUS": "2xT4", "GPU_POOL_TOKENS": f"ada:{ADA},admin:{ADMIN}"}) as server:
        yield server


@pytest.fixture
def server(running: ServerProcess) -> Iterator[ServerProcess]:
    """Without leases, quotas, groups and bookings, and with all GPUs in service."""
    yield running
    for kind, name in (("quotas", "owner"), ("groups", "name"), ("bookings", "id")):
        for plan in running.json(f"/{kind}")[kind]:
            running.ask(f"/{kind}/{plan[name]}", "DELETE", AS_ADMIN)
    for gpu in ("0", "1"):
        running.ask(f"/admin/gpus/{gpu}/undrain", "POST", AS_ADMIN)
    release_all(running, AS_ADMIN)


def as_ada(server: ServerProcess, *arguments: str) -> Done:
    return called(*arguments, server=server, env={"GPU_POOL_TOKEN": ADA})


# --- quota -----------------------------------------------------------------------------------------------------------


def test_a_quota_is_set_listed_and_removed(server: ServerProcess) -> None:
    take(server, owner="bob")
    limits = ("--gpus", "2", "--weight", "1.5", "--max-priority", "5", "--max-time", "2h")
    done = called("quota", "set", "bob", *limits, "--max-queued", "10", server=server)
    assert done.code == 0, done.err
    assert done.out == (
        "bob: at most 2 GPUs, weight 1.5, priority at most 5, time limit at most 2h, at most 10 waiting\n"
    )
    called("quota", "set", "*", "--gpus", "1", server=server)
    take(server, owner="carol")

    heading, *rows = [line.split() for line in called("quota", "list", server=server).out.splitlines()]
    assert heading == ["OWNER", "GPUS", "WEIGHT", "HAS", "WAITS", "USED", "SHARE", "LIMITS"]
    assert rows[0][:5] == ["*", "1", "1", "-", "-"]
    assert rows[1][:5] == ["bob", "2", "1.5", "1", "0"]
    assert " ".join(rows[1][7:]) == "priority 5, time 2h, 10 waiting"
    assert rows[2][:5] == ["carol", "1", "1", "1", "0"]

    at = called("quota", "list", "--json", server=server).json
    assert [(quota["owner"], quota["gpus"], quota["held_gpus"]) for quota in at["quotas"]] == [
        ("*", 1, None),
        ("bob", 2, 1.0),
    ]
    assert [other["owner"] for other in at["others"]] == ["carol"]
    assert called("quota", "remove", "bob", server=server).out == "the quota of bob is removed\n"
    again = called("quota", "remove", "bob", server=server)
    assert (again.code, again.out) == (1, "")
    assert "bob has no quota" in again.err


def test_an_operator_names_one_server(server: ServerProcess) -> None:
    both = f"{server.url},http://127.0.0.1:{free_port()}"
    for command in (
        ("quota", "set", "bob", "--gpus", "2"),
        ("quota", "list"),
        ("reserve", "--for", "1h"),
        ("drain", "0"),
    ):
        done = called(*command, "-e", both)
        assert (done.code, "name one with --endpoint" in done.err) == (2, True)
    assert called("quota", "list", server=f"http://127.0.0.1:{free_port()}").code == 125
    assert server.json("/quotas")["quotas"] == []


def test_a_group_is_set_listed_shown_and_removed(server: ServerProcess) -> None:
    node = server.json("/pool")["node"]
    take(server, owner="root")
    added = (
        "group",
        "add",
        "vision",
        "--members",
        "root, zoe",
        "--gpus",
        f"{node}:0-1",
        "--first-right",
        "--quota",
        "8",
    )
    done = called(*added, server=server)
    assert done.code == 0, done.err
    said = f"vision: root, zoe; at most 8 GPUs together; first on {node}:0-1, which others may use until they ask"
    assert done.out.split() == said.split()
    assert "zoe" in done.err
    _, row = [line.split() for line in called("group", "list", server=server).out.splitlines()]
    assert row == ["vision", "8", "1", "0", f"{node}:0-1", "root,", "zoe"]
    for command in (("quota", "list"), ("status",)):
        assert "group vision: root, zoe; at most 8" in called(*command, server=server).out
    assert "group vision: " in called("report", server=server).out
    assert called("group", "remove", "vision", server=server).out == "the group vision is removed\n"
    assert "there are no groups" in called("group", "list", server=server).err
    assert (
        "at most 1 GPU together"
        in called("group", "add", "one", "--members", "root", "--quota", "1", server=server).out
    )
    assert called("group", "remove", "one", server=server).code == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--members", "ada", "--gpus", "0"), "--first-right and --gpus belong together"),
        (("--members", "ada"), "give --quota, or --gpus with --first-right"),
        (("--members", " , ", "--quota", "1"), "--members names nobody"),
        (("--members", "@no-such-group", "--quota", "1"), "no Unix group no-such-group"),
    ],
)
def test_a_group_that_cannot_be_is_refused(server: ServerProcess, options: tuple[str, ...], why: str) -> None:
    done = called("group", "add", "vision", *options, server=server)
    assert done.code != 0
    assert why in done.err
    assert server.json("/groups")["groups"] == []


def test_a_quota_that_cannot_be_is_refused_and_only_admin_sets_one(server: ServerProcess) -> None:
    empty = called("quota", "set", "bob", server=server)
    assert (empty.code, "--gpus" in empty.err) == (2, True)
    wrong = called("quota", "set", "bob", "--weight", "0", server=server)
    assert (wrong.code, "weight" in wrong.err) == (1, True)
    for words in (("set", "ada", "--gpus", "2"), ("remove", "ada")):
        denied = as_ada(server, "quota", *words)
        assert (denied.code, "GPU_POOL_TOKEN" in denied.err) == (1, True)
    assert server.json("/quotas")["quotas"] == []
    assert called("quota", "set", "bob", "--max-time", "soon", server=server).code == 2


@pytest.mark.parametrize(("behaviour", "code"), [(not_found, 125), (statistics(1), 125), (internal_error, 125)])
def test_what_is_no_server_with_quotas_is_told_so(behaviour: Behaviour, code: int) -> None:
    with ForeignServer(behaviour) as foreign:
        done = called("quota", "set", "bob", "--gpus", "1", server=foreign.url)
    assert (done.code, done.out) == (code, "")
    assert "was not" in done.err


# --- reserve ---------------------------------------------------------------------------------------------------------


def test_gpus_are_booked_listed_and_cancelled(server: ServerProcess) -> None:
    booked = called(
        *("reserve", "--at", "2099-12-01 09:00", "--for", "4h", "--gpus", "2", "--owner", "ada"),
        *("--model", "T4", "--reason", "[b]a course"),
        server=server,
    )
    words = "booked for ada from 2099-12-01 09:00 until 2099-12-01 13:00: [b]a course"
    (kept,) = server.json("/bookings")["bookings"]
    assert (booked.code, booked.out) == (0, f"GPUs 0, 1 {words} ({kept['id']})\n"), booked.err
    local = datetime(2099, 12, 1, 9).astimezone()
    assert datetime.fromisoformat(kept["starts_at"]) == local, "times are those of the caller's time zone"

    until = called("reserve", "--at", "2099-12-02T09:00", "--for", "1h", "--gpu", "1", "--json", server=server)
    assert until.json["owner"] == user_name()
    assert [gpu["gpu_id"] for gpu in until.json["gpus"]] == [1]
    heading, *rows = called("reserve", server=server).out.splitlines()
    assert heading.split() == ["ID", "GPUS", "FOR", "WHEN", "REASON", "BOOKED", "BY"]
    assert [row.split()[0] for row in rows] == [kept["id"], until.json["id"]]
    assert "2099-12-01 09:00 until 2099-12-01 13:00" in rows[0]
    status = called("status", server=server).out
    assert f"GPUs 0, 1 {words}" in status.splitlines()
    assert called("reserve", "--json", server=server).json["bookings"][0]["id"] == kept["id"]

    gone = called("reserve", "--cancel", kept["id"][:12], server=server)
    assert gone.out == f"cancelled: GPUs 0, 1 {words} ({kept['id']})\n"
    assert called("reserve", "--cancel", kept["id"], server=server).code == 1
    assert [booking["id"] for booking in server.json("/bookings")["bookings"]] == [until.json["id"]]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--at", "09:00"), 2, "--for 4h"),
        (("--at", "tomorrow", "--for", "1h"), 2, "'tomorrow' is not a time"),
        (("--at", "2020-01-01", "--for", "1h"), 2, "would end before now"),
        (("--for", "1h", "--gpus", "3"), 1, "this box has 2 GPUs"),
        (("--for", "1h", "--gpu", "7"), 1, "nothing was booked"),
        (("--for", "1h", "--cancel", "x"), 2, "--cancel"),
        (("--cancel", "nothing"), 1, "no booking nothing"),
    ],
)
def test_what_cannot_be_booked_is_told_and_changes_nothing(
    server: ServerProcess, words: tuple[str, ...], code: int, said: str
) -> None:
    done = called("reserve", *words, server=server)
    assert (done.code, done.out) == (code, "")
    assert said in done.err
    assert server.json("/bookings")["bookings"] == []
    assert "nothing is booked" in called("reserve", server=server).err


def test_a_user_books_within_its_quota_only(server: ServerProcess) -> None:
    denied = as_ada(server, "reserve", "--for", "1h")
    assert (denied.code, "ada has no quota" in denied.err) == (1, True)
    called("quota", "set", "ada", "--gpus", "1", server=server)
    assert as_ada(server, "reserve", "--for", "1h").out.startswith("GPU 0 booked for ada until")
    assert as_ada(server, "reserve", "--for", "1h", "--owner", "bob").code == 1


# --- drain -----------------------------------------------------------------------------------------------------------


def test_a_drain_is_planned_shown_and_cancelled(server: ServerProcess) -> None:
    done = called("drain", "--all", "--at", "2099-12-01 18:00", "--reason", "new fans", server=server)
    assert done.out.splitlines() == [f"GPU {gpu} will be out of service from 2099-12-01 18:00" for gpu in (0, 1)]
    status = called("status", server=server)
    assert "GPU 1 out of service from 2099-12-01 18:00 on: new fans" in status.out.splitlines()
    at = called("status", "--json", server=server).json
    assert [booking["owner"] for booking in at["bookings"]] == [None, None]
    back = called("undrain", "0", "1", server=server)
    assert back.out.splitlines()[0] == "GPU 0 is back in service; it is free now"
    assert server.json("/bookings")["bookings"] == []
    assert called("drain", "0", "--at", "noon", server=server).code == 2
    past = called("drain", "0", "--at", "2020-01-01 18:00", server=server)
    assert (past.code, past.out) == (2, "")
    assert "2020-01-01 18:00 is in the past; leave it out to drain now" in past.err


def test_drain_waits_until_no_lease_is_left(server: ServerProcess) -> None:
    lease = take(server, owner="bob", labels={"command": "train.py"})
    gpu = str(lease["gpus"][0]["gpu_id"])
    assert called("drain", str(1 - int(gpu)), "--wait", server=server).code == 0, "nobody has it"
    with start_gpu_pool("drain", gpu, "--wait", server=server) as draining:
        assert draining.stderr is not None
        assert f"waiting: GPU {gpu} has bob, train.py, since " in draining.stderr.readline()
        release(server, lease["id"])
        assert draining.wait(timeout=30) == 0
        assert f"no lease is left on GPU {gpu}" in draining.stderr.read()


def test_ctrl_c_ends_the_waiting_only_and_undrain_ends_it_too(server: ServerProcess) -> None:
    take(server, gpus=2)
    with start_gpu_pool("drain", "--all", "--wait", server=server) as draining:
        assert draining.stderr is not None
        draining.stderr.readline()
        draining.send_signal(signal.SIGINT)
        assert draining.wait(timeout=30) == 130
        said = draining.stderr.read()
    assert "stay drained" in said
    assert "Traceback" not in said
    assert [gpu["is_out_of_service"] for gpu in server.json("/pool")["gpus"]] == [True, True]
    with start_gpu_pool("drain", "0", "--wait", server=server) as draining:
        assert draining.stderr is not None
        draining.stderr.readline()
        called("undrain", "0", server=server)
        assert draining.wait(timeout=30) == 1
        assert "GPU 0 is back in service" in draining.stderr.read()
    assert called("drain", "0", "--wait", "--at", "2099-01-01", server=server).code == 2


# --- release --mine --------------------------------------------------------------------------------------------------


def test_release_mine_asks_and_releases_all_of_the_caller_and_nothing_else(
    server: ServerProcess, tmp_path: Path
) -> None:
    env = {"GPU_POOL_JOBS_DIR": str(tmp_path / "jobs")}
    mine, other, waiter = new_id("mine"), new_id("other"), new_id("waiter")
    take(server, mine, labels={"command": "train.py"})
    take(server, other, owner="bob")
    queue(server, waiter)
    unasked = called("release", "--mine", server=server, env=env)
    assert (unasked.code, "--yes" in unasked.err) == (2, True)
    with Terminal([*GPU_POOL, "release", "--mine"], environment(server, env)) as terminal:
        asked = terminal.wait_for("Cancel 2 leases?")
        assert f"{mine} holds GPU " in asked
        assert f"{waiter} waits" in asked
        terminal.type("n\n")
        assert terminal.wait() == 0
    assert get(server, mine)["state"] == "active"
    done = called("release", "--mine", "--yes", server=server, env=env)
    assert (done.code, len(done.out.splitlines())) == (0, 2), done.err
    assert [get(server, id_)["end_reason"] for id_ in (mine, other, waiter)] == ["released", None, "cancelled"]
    assert "you have nothing running or waiting" in called("release", "--mine", server=server, env=env).err
    assert called("release", "--mine", other, server=server).code == 2
    assert called("release", server=server).code == 2


def test_a_server_that_says_why_it_books_nothing_has_booked_nothing(server: ServerProcess) -> None:
    with EntryPoint(server, "a", {"a": (0, 1, 2, 3)}) as box:
        box.is_leaderless = True
        done = called("reserve", "--for", "1h", env={"GPU_SERVICE_ENDPOINT": box.url})
    assert done.code == 125
    assert "nothing was booked" in done.err
    assert "Nobody leads this fleet" in done.err
    assert "not known" not in done.err
