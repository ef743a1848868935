"""`jobs`, `release`, `explain`, `drain` and `undrain` at a real server that has tokens."""

from __future__ import annotations

import getpass
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_worker_pool.cli.pools.report import short_ids
from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.testing import ServerProcess
from tests.cli.in_process import called
from tests.cli.own_process import gpu_pool
from tests.client.foreign_servers import (
    Behaviour,
    ForeignServer,
    ScriptedLeases,
    internal_error,
    lease,
    not_found,
    saying,
    statistics,
)
from tests.server.leasing import OFTEN, get, new_id, put, queue, queued, release, release_all, take, wait_until_free
from tests.server.running import free_port

ADA, BOB, ADMIN = "the-secret-of-ada", "the-secret-of-bob", "the-secret-of-admin"
AS_ADA = {"Authorization": f"Bearer {ADA}"}
AS_ADMIN = {"Authorization": f"Bearer {ADMIN}"}


@pytest.fixture(scope="module")
def running() -> Iterator[ServerProcess]:
    with ServerProcess(
        {**OFTEN, "SIMULATED_GPUS": "2xT4", "GPU_POOL_TOKENS": f"ada:{ADA},bob:{BOB},admin:{ADMIN}"}
    ) as server:
        yield server


@pytest.fixture
def server(running: ServerProcess) -> Iterator[ServerProcess]:
    """With all GPUs free."""
    yield running
    release_all(running, AS_ADMIN)


# --- jobs ----------------------------------------------------------------------------------------------------------


def test_jobs_of_all_users_shows_who_holds_and_who_waits(server: ServerProcess) -> None:
    mine, other, waiter = new_id("mine"), new_id("other"), new_id("waiter")
    take(server, mine, owner=getpass.getuser(), worker_id="w1", labels={"command": "python train.py"})
    take(server, other, owner="[b]bob", ttl_s=90)
    queue(server, waiter, owner="carol", priority=-7)
    down = free_port()
    done = called("jobs", "--all", "-e", f"{server.url},http://127.0.0.1:{down}")
    assert done.code == 0
    assert f"127.0.0.1-{down} is down" in done.err
    heading, *rows = [line.split() for line in done.out.splitlines()]
    assert heading == ["ID", "STATE", "OWNER", "GPU", "SINCE", "STARTS", "NOTES", "COMMAND"]
    assert [row[1:3] for row in rows] == [["running", getpass.getuser()], ["running", "[b]bob"], ["waiting", "carol"]]
    assert [id_.startswith(row[0]) for id_, row in zip((mine, other, waiter), rows, strict=True)] == [True] * 3
    assert rows[0][-1] == "train.py"
    assert "priority -7" in done.out
    of_mine = called("jobs", "--json", server=server).json
    assert [lease["id"] for lease in of_mine["leases"]] == [mine]


def test_ids_are_shortened_to_what_only_one_has() -> None:
    assert short_ids(["abcdefgh-1", "abcdefgh-2", "zz", "zzz"]) == {
        "abcdefgh-1": "abcdefgh-1",
        "abcdefgh-2": "abcdefgh-2",
        "zz": "zz",
        "zzz": "zzz",
    }
    assert short_ids(["0123456789", "9876543210"]) == {"0123456789": "01234567", "9876543210": "98765432"}


# --- release -------------------------------------------------------------------------------------------------------


def test_release_gives_back_leaves_the_queue_and_takes_a_beginning_that_only_one_has(server: ServerProcess) -> None:
    take(server, "give-1-back", owner="bob")
    take(server, "give-2-back", owner="carol")
    queue(server, "leave-the-queue", owner="dave")
    unsure = called("release", "give", server=server)
    assert (unsure.code, unsure.out) == (1, "")
    assert "give-1-back, give-2-back" in unsure.err
    done = gpu_pool("release", "leave", "give-1", "nobody", server=server)
    assert done.code == 1
    first, second = done.out.splitlines()
    assert first.startswith("dave's request left the queue")
    assert second.startswith("bob's lease on GPU ")
    assert second.endswith("(give-1-back)")
    assert "no job or lease nobody" in done.err
    assert [get(server, id_)["end_reason"] for id_ in ("leave-the-queue", "give-1-back")] == ["cancelled", "released"]
    assert get(server, "give-2-back")["state"] == "active"


def test_an_id_that_is_over_is_not_taken_for_the_beginning_of_another_one(server: ServerProcess) -> None:
    take(server, "run-1", owner="bob")
    release(server, "run-1")
    wait_until_free(server)
    take(server, "run-10", owner="carol")
    done = called("release", "run-1", "--json", server=server).json
    assert [(lease["id"], lease["end_reason"]) for lease in done["released"]] == [("run-1", "released")]
    assert get(server, "run-10")["state"] == "active"


def test_who_may_not_release_is_told_whose_it_is_and_what_is_needed(server: ServerProcess) -> None:
    lease_id = new_id("adas")
    assert put(server, lease_id, headers=AS_ADA).status == 201
    refused = called("release", lease_id, "--json", server=server, env={"GPU_POOL_TOKEN": BOB})
    assert refused.code == 1
    assert "belongs to ada" in refused.err
    assert "you are bob" in refused.err
    assert "GPU_POOL_TOKEN" in refused.err
    assert [item["id"] for item in refused.json["failed"]] == [lease_id]
    assert get(server, lease_id)["state"] == "active"
    (gone,) = called("release", lease_id, "--json", server=server, env={"GPU_POOL_TOKEN": ADA}).json["released"]
    assert (gone["state"], gone["owner"]) == ("ended", "ada")
    assert get(server, lease_id)["end_reason"] == "released"


def test_what_waits_at_several_servers_under_one_id_leaves_all_queues(server: ServerProcess) -> None:
    take(server, gpus=2)
    lease_id = new_id("everywhere")
    queue(server, lease_id)
    with ServerProcess({**OFTEN, "SIMULATED_GPUS": "1"}) as second:
        take(second)
        queue(second, lease_id)
        both = f"{server.url},{second.url},http://127.0.0.1:{free_port()}"
        done = called("release", lease_id, "-e", both)
        assert done.code == 0, done.err
        assert len(done.out.splitlines()) == 2
        assert (queued(server), queued(second)) == ([], [])
        unknown = called("release", "nothing", "-e", both)
    assert unknown.code == 1
    assert "so it may be there" in unknown.err


# --- explain -------------------------------------------------------------------------------------------------------


def test_explain_tells_a_waiter_who_holds_what_and_a_lease_how_it_stands(server: ServerProcess) -> None:
    holder, waiter = new_id("holder"), new_id("waiter")
    take(server, holder, owner="[red]bob", labels={"command": "python train.py"}, ttl_s=600)
    queue(server, waiter, owner="carol", gpus=2)
    why = called("explain", waiter, server=server)
    assert why.code == 0
    head, start, reason, _, *rows = why.out.splitlines()
    assert start.startswith("Start: ")
    assert reason.startswith("Why: ")
    assert head.startswith(f"carol ({waiter}) waits at 127.0.0.1 for 2 GPUs on one node: position 1 of 1")
    assert sorted(row.split("Tesla T4")[1].split()[0] for row in rows) == ["available", "leased"]
    assert any("leased by [red]bob" in row and "  [red]bob, python train.py, since " in row for row in rows)
    (told,) = called("explain", waiter, "--json", server=server).json["leases"]
    assert sorted(item["code"] for item in told["obstacles"]) == ["eligible", "leased"]
    assert "holds GPU " in called("explain", holder, server=server).out
    assert "expire" not in called("explain", holder, server=server).out
    release(server, waiter)
    assert f"it was taken out of the queue by {user_name()}" in called("explain", waiter, server=server).out
    assert called("explain", "nobody", server=server).code == 1


# --- servers that are not ours, or in a bad way ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (statistics(), "has statistics only"),
        (not_found, "status 404"),
        (internal_error, "status 500"),
        (saying(200, b"null"), "shows no GPU"),
        (saying(200, b'{"state": "free"}'), "shows no GPU"),
        (saying(200, b"[]"), "shows no GPU"),
    ],
)
def test_drain_fails_where_nothing_was_drained(behaviour: Behaviour, words: str) -> None:
    with ForeignServer(behaviour) as foreign:
        done = called("drain", "0", "-e", foreign.url)

    assert (done.code, done.out) == (125, "")
    assert words in done.err


@pytest.mark.parametrize("delete", [(200, None), (503, {"detail": "Nothing can be ended now."})])
def test_release_fails_where_nothing_is_known_to_be_released(delete: object) -> None:
    pool = {**ScriptedLeases.empty_pool(), "leases": [lease("mine", "active")]}
    with ForeignServer(ScriptedLeases(pool=(200, pool), delete=delete).behaviour()) as foreign:
        done = called("release", "mine", "--json", "-e", foreign.url)

    assert done.code == 125
    assert ([item["id"] for item in done.json["failed"]], done.json["released"]) == (["mine"], [])


def test_an_empty_id_is_typed_wrong_and_nothing_is_released(server: ServerProcess) -> None:
    held = take(server)
    done = called("release", held["id"], "", "--json", server=server)

    assert (done.code, done.out) == (2, "")
    assert "an id is empty" in done.err
    assert get(server, held["id"])["state"] == "active"


# --- drain, undrain ------------------------------------------------------------------------------------------------


def test_drain_takes_a_gpu_out_of_service_and_only_admin_may(server: ServerProcess) -> None:
    refused = called("drain", "1", server=server, env={"GPU_POOL_TOKEN": BOB})
    assert (refused.code, refused.out) == (1, "")
    assert "GPU_POOL_TOKEN" in refused.err
    admin = {"GPU_POOL_TOKEN": ADMIN}
    done = called("drain", "1", "--reason", "bad [fan]", server=server, env=admin)
    assert (done.code, done.out) == (0, "GPU 1 is out of service (bad [fan])\n")
    assert [gpu["state"] for gpu in server.json("/pool")["gpus"]] == ["free", "out_of_service"]
    both = f"{server.url},http://127.0.0.1:{free_port()}"
    assert called("undrain", "1", "-e", both, env=admin).code == 2
    assert called("undrain", "1", server=server, env=admin).out == "GPU 1 is back in service; it is free now\n"
    assert called("drain", "9", server=server, env=admin).code == 1


@pytest.mark.parametrize("which", [("0", "1"), ("127.0.0.1",), ("--all",)])
def test_drain_takes_several_gpus_or_all_of_a_box(server: ServerProcess, which: tuple[str, ...]) -> None:
    admin = {"GPU_POOL_TOKEN": ADMIN}
    done = called("drain", *which, server=server, env=admin)
    assert [line[:5] for line in done.out.splitlines()] == ["GPU 0", "GPU 1"]
    assert [gpu["state"] for gpu in server.json("/pool")["gpus"]] == ["out_of_service"] * 2
    node = server.json("/pool")["node"]
    assert called("undrain", node if which == ("--all",) else "--all", server=server, env=admin).code == 0
    assert [gpu["state"] for gpu in server.json("/pool")["gpus"]] == ["free"] * 2


@pytest.mark.parametrize("which", [(), ("0", "--all"), ("0", "nowhere:1"), ("",)])
def test_drain_of_what_is_not_there_changes_nothing(server: ServerProcess, which: tuple[str, ...]) -> None:
    assert called("drain", *which, server=server, env={"GPU_POOL_TOKEN": ADMIN}).code == 2
    assert [gpu["state"] for gpu in server.json("/pool")["gpus"]] == ["free"] * 2


def test_drain_says_of_each_gpu_whether_it_was_done(server: ServerProcess) -> None:
    done = called("drain", "0", "98", "99", server=server, env={"GPU_POOL_TOKEN": ADMIN})
    assert (done.code, done.out) == (1, "GPU 0 is out of service\n")
    assert "cannot drain GPU 98: " in done.err
    assert "cannot drain GPU 99: " in done.err
    assert called("undrain", "0", server=server, env={"GPU_POOL_TOKEN": ADMIN}).code == 0
    elsewhere = called("drain", "gpu-1:0", server=server)
    assert "'gpu-1:0' is not a GPU of 127.0.0.1; it has 0, 1" in elsewhere.err
    denied = called("drain", "0", "1", server=server, env={"GPU_POOL_TOKEN": BOB})
    assert denied.err.count("cannot drain GPUs 0, 1: ") == 1


# --- in the shell --------------------------------------------------------------------------------------------------


def test_the_shell_completes_ids_and_is_told_nothing_where_that_fails(server: ServerProcess) -> None:
    lease_id = new_id("complete")
    take(server, lease_id, owner="$(touch /tmp/owned)`x`")
    asked = ("--complete", "release", "compl")
    done = gpu_pool(*asked, server=server)
    assert lease_id in done.out
    assert not set("$`\\") & set(done.out)
    away = gpu_pool(*asked, server=f"http://127.0.0.1:{free_port()}")
    assert "complete-" not in away.out
    assert away.err == ""


# --- what is mine --------------------------------------------------------------------------------------------------


def test_mine_is_what_the_server_knows_as_mine(server: ServerProcess, tmp_path: Path) -> None:
    """The lab's bug 19: with a token, `--mine` looked for the login name, and not for the token's."""
    adas, waits = new_id("adas"), new_id("waits")
    assert put(server, adas, headers=AS_ADA).status == 201
    take(server, owner="bob")
    assert put(server, waits, headers=AS_ADA, gpus=1).status == 202
    ada = {"GPU_POOL_TOKEN": ADA, "GPU_POOL_JOBS_DIR": str(tmp_path / "jobs")}
    mine = called("jobs", "--json", server=server, env=ada).json["leases"]
    assert [lease["id"] for lease in mine] == [adas, waits]
    assert [lease["id"] for lease in called("status", "--mine", "--json", server=server, env=ada).json["leases"]] == [
        adas
    ]

    why = called("explain", server=server, env=ada)
    forecast, waiting = why.out.splitlines()[:2]
    assert forecast.startswith("If you ask now: ")
    assert waiting.startswith(f"ada ({waits}) waits at 127.0.0.1 for 1 GPU: position 1 of 1")
    assert "you have no waiting requests" in called("explain", server=server, env={"GPU_POOL_TOKEN": BOB}).err

    assert called("release", "--mine", "--yes", server=server, env=ada).code == 0
    assert [get(server, id_)["end_reason"] for id_ in (adas, waits)] == ["released", "cancelled"]
