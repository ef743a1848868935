"""`gpu-pool run --nodes`, `--ssh` and `join` at real boxes of a real fleet, with a real ssh."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from gpu_worker_pool.cli.run.ssh import SshCommands
from gpu_worker_pool.client import GPUWorkerPoolClient
from tests.cli.in_process import called
from tests.cli.own_process import GPU_POOL, Done, environment, gpu_pool
from tests.client.fault_tools import QUICK, soon
from tests.ledger.postgres.server import PostgresServer

from .fleet import GPUS, Box, Fleet, fleet_of, until
from .sshd import sshd

NODES = ("candidate0", "candidate1")


@pytest.fixture(scope="module")
def fleet(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three boxes; commands run at the second one, and the third one is drained."""
    postgres.create_database("gang")
    with fleet_of(postgres, "gang", tmp_path_factory.mktemp("fleet"), 3) as found:
        until(lambda: free_gpus(found) == 3 * GPUS, "all boxes are up")
        drained = called("drain", "candidate2", env={"GPU_SERVICE_ENDPOINT": found.candidates[0].url})
        assert drained.code == 0, drained
        yield found


def free_gpus(fleet: Fleet) -> int:
    status, pool = fleet.candidates[0].call("GET", "/fleet/pool")
    return sum(gpu["state"] == "free" for gpu in pool["gpus"]) if status == 200 else 0


@pytest.fixture(scope="module")
def ssh(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """ssh leads to the first box."""
    there = {"GPU_SERVICE_ENDPOINT": fleet.candidates[0].url, "GPU_POOL_JOBS_DIR": str(tmp_path_factory.mktemp("jobs"))}
    with sshd(tmp_path_factory.mktemp("ssh"), there) as found:
        yield {**found, "GPU_SERVICE_ENDPOINT": fleet.candidates[1].url}


@pytest.fixture(autouse=True)
def all_are_free(fleet: Fleet) -> Iterator[None]:
    yield
    until(lambda: free_gpus(fleet) == 2 * GPUS, "all GPUs are free again")


def run_script(script: str, env: dict[str, str], *options: str) -> Done:
    command = ("run", "-q", "--gpus", "1", "--nodes", "2", *options, "--", "sh", "-c", script)
    return gpu_pool(*command, env=env)


def variables(path: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)


def test_without_ssh_it_says_how_the_others_join(fleet: Fleet, tmp_path: Path) -> None:
    env = {"GPU_SERVICE_ENDPOINT": fleet.candidates[1].url}
    done = run_script(f"env > {tmp_path}/env; exit 3", env)
    assert done.code == 3, done
    seen = variables(tmp_path / "env")
    assert (seen["GPU_POOL_NODES"], seen["GPU_POOL_NODE_RANK"]) == (",".join(NODES), "1")
    assert seen["MASTER_ADDR"]
    assert "on candidate0, as the same user" in done.err
    assert f"gpu-pool join {seen['GPU_POOL_LEASE_ID']}" in done.err
    refused = gpu_pool("join", seen["GPU_POOL_LEASE_ID"], "--", "true", env=env)
    assert (refused.code, "not active" in refused.err) == (1, True), refused


def test_gpus_have_the_names_of_their_nodes(fleet: Fleet) -> None:
    command = ("run", "--gpus", str(GPUS), "--nodes", "2", "--", "sh", "-c", "echo $GPU_POOL_LEASE_GPUS")
    done = gpu_pool(*command, env={"GPU_SERVICE_ENDPOINT": fleet.candidates[1].url})
    names = ", ".join(f"{node}:{index}" for node in NODES for index in range(GPUS))
    assert f"GPUs {names} granted" in done.err
    assert done.out.strip() == ",".join(map(str, range(GPUS))), "a command knows those of its own box"


async def test_another_box_joins_until_the_lease_ends(fleet: Fleet, tmp_path: Path) -> None:
    told = tmp_path / "env"
    async with GPUWorkerPoolClient(fleet.candidates[0].url, scope="fleet", **QUICK) as client:
        held = await client.request_gpu(timeout=30, gpus=GPUS, nodes=2)
        joining = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gpu_worker_pool", "join", held.lease_id or ""),
            *("--", "sh", "-c", f"env > {told}.new; mv {told}.new {told}; sleep 1000"),
            env={**environment(None, {"GPU_SERVICE_ENDPOINT": fleet.candidates[1].url})},
            stderr=asyncio.subprocess.PIPE,
        )
        await soon(told.exists, "the command has started")
        seen = variables(told)
        visible = held.node_envs["candidate1"]["CUDA_VISIBLE_DEVICES"]
        assert (seen["CUDA_VISIBLE_DEVICES"], seen["GPU_POOL_LEASE_GPUS"]) == (visible, visible)
        assert (seen["GPU_POOL_NODE_RANK"], seen["GPU_POOL_LEASE_ID"]) == ("1", held.lease_id)
        assert not held.is_lost
        await client.release_gpu(held)
        _, err = await joining.communicate()
    assert joining.returncode == 125, err
    assert b"the command is stopped" in err


def test_what_cannot_be_run_on_several_boxes_is_refused_before_a_request(fleet: Fleet) -> None:
    env = {"GPU_SERVICE_ENDPOINT": fleet.candidates[1].url}
    for name, words in (
        ("NOPE", "no such variable"),
        ("PATH=2", "the name of a variable only"),
        ("", "no such variable"),
    ):
        done = called("run", "--nodes", "2", "--gpus", "99", "--ssh", "--env", name, "--", "true", env=env)
        assert (done.code, words in done.err) == (2, True), done
    alone = gpu_pool("run", "--nodes", "2", "--gpus", "1", "--env", "X", "--", "true", env=env)
    assert "--env needs --ssh" in alone.err
    inside = {**env, "GPU_POOL_LEASE_ID": "outer", "GPU_POOL_LEASE_URL": fleet.candidates[1].url}
    done = gpu_pool("run", "--nodes", "2", "--", "true", env=inside)
    assert (done.code, "inside the lease outer" in done.err, "--new" in done.err) == (125, True, True), done


def test_a_box_without_a_part_holds_nothing(fleet: Fleet) -> None:
    done = run_script("true", {"GPU_SERVICE_ENDPOINT": fleet.candidates[2].url})
    assert done.code == 125, done
    assert "this machine has no part in the lease, which was on candidate0, candidate1" in done.err


# --- with ssh --------------------------------------------------------------------------------------------------------------


def test_ssh_starts_the_command_on_the_other_boxes(ssh: dict[str, str], tmp_path: Path) -> None:
    env = {**ssh, "SECRET": "it's a\nsecret-word", "TOLD": str(tmp_path)}
    both = (
        'env > "$TOLD/$GPU_POOL_NODE_RANK.new"; mv "$TOLD/$GPU_POOL_NODE_RANK.new" "$TOLD/$GPU_POOL_NODE_RANK"; '
        f'cat /proc/[0-9]*/cmdline > "{tmp_path}/lines"; until [ -e "$TOLD/0" ] && [ -e "$TOLD/1" ]; do sleep 0.05; done'
    )
    done = run_script(both, env, "--ssh", "--env", "TOLD", "--env", "SECRET")
    assert done.code == 0, done
    assert b"secret-word" not in (tmp_path / "lines").read_bytes(), "every user can read command lines"
    assert "SECRET=it's a\nsecret-word\n" in (tmp_path / "0").read_text()
    seen = [variables(tmp_path / rank) for rank in "01"]
    assert len({told["GPU_POOL_LEASE_ID"] for told in seen}) == 1
    assert len({told["MASTER_ADDR"] for told in seen}) == 1
    assert [told["GPU_POOL_LEASE_GPUS"] for told in seen] == [told["CUDA_VISIBLE_DEVICES"] for told in seen]


def test_all_are_waited_for_and_the_first_that_fails_counts(ssh: dict[str, str]) -> None:
    """The command here has ended well long before."""
    assert run_script('[ "$GPU_POOL_NODE_RANK" = 1 ] || { sleep 1; exit 7; }', ssh, "--ssh").code == 7


def test_a_command_that_fails_on_another_box_ends_all(ssh: dict[str, str]) -> None:
    done = run_script('[ "$GPU_POOL_NODE_RANK" = 1 ] || exit 5; exec sleep 1000', ssh, "--ssh")
    assert (done.code, "the command on candidate0 ended with exit code 5" in done.err) == (5, True), done


def test_a_command_that_fails_here_ends_the_others(ssh: dict[str, str]) -> None:
    done = run_script('[ "$GPU_POOL_NODE_RANK" = 0 ] || exit 6; exec sleep 1000', ssh, "--ssh")
    assert (done.code, "ended with exit code" in done.err) == (6, False), done


def test_an_ssh_that_cannot_connect_ends_all(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text('#!/bin/sh\nexec /usr/bin/ssh -o Port=1 "$@"\n')
    (tmp_path / "ssh").chmod(0o755)
    env = {"GPU_SERVICE_ENDPOINT": fleet.candidates[1].url, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = run_script("exec sleep 1000", env, "--ssh")
    assert (done.code, "or ssh could not connect" in done.err) == (255, True), done


def test_a_command_that_is_told_to_end_has_its_own_exit_code(ssh: dict[str, str], tmp_path: Path) -> None:
    gpu_pool_pid = "$(ps -o ppid= -p $PPID)"
    here = f"trap 'exit 7' TERM; until [ -e {tmp_path}/there ]; do sleep 0.05; done; kill -TERM {gpu_pool_pid}; sleep 1000 & wait"
    script = f'[ "$GPU_POOL_NODE_RANK" = 1 ] || {{ touch {tmp_path}/there; exec sleep 1000; }}; {here}'
    done = run_script(script, ssh, "--ssh")
    assert (done.code, "ended with exit code" in done.err) == (7, False), done


def test_a_box_without_a_part_has_the_others_run_it(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> None:
    """ssh leads to the first box, whichever is named."""
    with sshd(tmp_path_factory.mktemp("ssh"), {"GPU_SERVICE_ENDPOINT": fleet.candidates[0].url}) as found:
        env = {**found, "GPU_SERVICE_ENDPOINT": fleet.candidates[2].url}
        assert run_script("exit 9", env, "--ssh").code == 9


async def test_the_name_of_a_host_is_not_an_option_of_ssh(tmp_path: Path) -> None:
    async with SshCommands() as others:
        await others.start("b", f"-oProxyCommand=touch {tmp_path}/seen", ["true"], {})
        failed = await others.wait()
    assert failed is not None
    assert failed[0] == 255
    assert not (tmp_path / "seen").exists()


# --- one place, on any box -------------------------------------------------------------------------------------------------


@contextmanager
def all_taken(box: Box) -> Iterator[None]:
    held = [uuid4().hex for _ in range(GPUS)]
    for lease_id in held:
        assert box.call("PUT", f"/leases/{lease_id}", {"gpus": 1})[1]["state"] == "active"
    yield
    for lease_id in held:
        box.call("DELETE", f"/leases/{lease_id}")


@pytest.fixture
def full(fleet: Fleet, ssh: dict[str, str]) -> Iterator[dict[str, str]]:
    """All GPUs of the box at which commands are run are taken; ssh leads to the other one."""
    with all_taken(fleet.candidates[1]):
        yield ssh


def test_a_command_runs_on_the_box_that_is_granted(full: dict[str, str], tmp_path: Path) -> None:
    script = "pwd; echo problem >&2; env > there; exit 5"
    done = gpu_pool(
        "run", "--anywhere", "--env", "TOLD", "--", "sh", "-c", script, env={**full, "TOLD": "a\nb'c"}, cwd=tmp_path
    )
    assert (done.code, done.out.strip()) == (5, str(tmp_path)), done
    assert "problem" in done.err
    assert "GPU candidate0:" in done.err
    assert "TOLD=a\nb'c\n" in (tmp_path / "there").read_text()
    seen = variables(tmp_path / "there")
    assert seen["GPU_POOL_LEASE_GPUS"] == seen["CUDA_VISIBLE_DEVICES"]
    assert "GPU_POOL_NODES" not in seen


def test_a_command_runs_here_where_this_box_is_granted(fleet: Fleet, ssh: dict[str, str]) -> None:
    env = {**ssh, "PATH": os.environ["PATH"], "GPU_POOL_ANYWHERE": "true"}  # without an ssh that leads there
    with all_taken(fleet.candidates[0]):
        done = gpu_pool("run", "--", "sh", "-c", "echo $GPU_POOL_LEASE_GPUS; exit 4", env=env)
    assert (done.code, done.out.strip().isdigit()) == (4, True), done


@pytest.mark.parametrize("how", ["TERM", "KILL"])
async def test_the_end_of_the_run_reaches_the_command_elsewhere(full: dict[str, str], tmp_path: Path, how: str) -> None:
    told = tmp_path / "pid"
    script = f"trap 'exit 9' TERM; echo $$ > {told}; while :; do sleep 0.1; done"
    command = (sys.executable, "-m", "gpu_worker_pool", "run", "-q", "--anywhere", "--", "sh", "-c", script)
    running = await asyncio.create_subprocess_exec(*command, env=environment(None, full))
    await soon(lambda: told.exists() and told.read_text(), "the command has started")
    running.send_signal(getattr(signal, f"SIG{how}"))
    assert await running.wait() == (9 if how == "TERM" else -signal.SIGKILL)
    await soon(lambda: not Path("/proc", told.read_text().strip()).exists(), "it has ended")


# Another user, who may read the Python of the one that runs the tests.
AS_NOBODY = (
    "setpriv", "--reuid=nobody", "--regid=65534", "--clear-groups",
    "--inh-caps=+dac_override", "--ambient-caps=+dac_override",
)  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_two_users_run_elsewhere_each_as_themselves(fleet: Fleet, full: dict[str, str], tmp_path: Path) -> None:
    there = {"GPU_SERVICE_ENDPOINT": fleet.candidates[0].url}
    run = [*GPU_POOL, "run", "-q", "--anywhere", "--", "sh", "-c", "id -un; exec sleep 600"]
    with sshd(tmp_path, there, AS_NOBODY) as found, ExitStack() as stack:
        theirs = environment(fleet.candidates[1].url, {**found, "HOME": str(tmp_path)})
        (tmp_path / "user").chmod(0o644)  # ssh of the one, key of the other
        started = [
            stack.enter_context(subprocess.Popen(command, env=env, cwd="/", stdin=-1, stdout=-1, stderr=-1, text=True))
            for command, env in ((run, environment(None, full)), ([*AS_NOBODY, *run], theirs))
        ]
        assert [each.stdout and each.stdout.readline() for each in started] == ["root\n", "nobody\n"]
        leases = fleet.candidates[0].call("GET", "/fleet/leases")[1]["leases"]
        owned = {each["owner"]: each["id"] for each in leases if each["gpus"][0]["node"] == "candidate0"}
        assert set(owned) == {"root", "nobody"}
        cancel = [*AS_NOBODY, *GPU_POOL, "cancel", owned["root"]]
        refused = subprocess.run(cancel, env=theirs, capture_output=True, text=True, check=False)
        assert (refused.returncode, "nobody" in refused.stderr) == (1, True), refused
        assert subprocess.run([*cancel[:-1], owned["nobody"]], env=theirs, check=False).returncode == 0
        started[1].communicate()
        started[0].terminate()
        started[0].communicate()


def test_a_submitted_command_runs_anywhere(full: dict[str, str], tmp_path: Path) -> None:
    env = {**full, "GPU_POOL_JOBS_DIR": str(tmp_path / "jobs")}
    script = f"until [ -e {tmp_path}/go-on ]; do sleep 0.05; done; echo it ran; exit 3"
    submitted = gpu_pool("submit", "--anywhere", "--", "sh", "-c", script, env=env)
    assert submitted.code == 0, submitted
    until(lambda: "its GPUs itself: see the leases below" in gpu_pool("jobs", env=env).out, "its lease is named")
    (tmp_path / "go-on").touch()
    shown = gpu_pool("logs", "-f", submitted.out.strip(), env=env)
    assert "it ran" in shown.out, shown


def test_without_it_a_wait_says_where_gpus_are_free(full: dict[str, str]) -> None:
    done = gpu_pool("run", "--timeout", "3s", "--", "true", env=full)
    assert (done.code, f"{GPUS} GPUs are free on candidate0; add --anywhere" in done.err) == (124, True), done


def test_what_ended_on_another_box_is_in_the_history_and_commands_are_run_there(
    full: dict[str, str], tmp_path: Path
) -> None:
    env = {**full, "GPU_POOL_JOBS_DIR": str(tmp_path)}
    assert gpu_pool("run", "-q", "--anywhere", "--name", "told-apart", "--", "true", env=env).code == 0
    past = gpu_pool("history", "--since", "1h", "--json", env=env)
    (lease,) = [each for each in json.loads(past.out)["leases"] if each["command"] == "told-apart"]
    assert lease["gpus"][0].startswith("candidate0:")
    there = gpu_pool("on", "candidate0", "jobs", "--json", env=env)
    assert (there.code, json.loads(there.out)["jobs"]) == (0, []), there
    assert gpu_pool("on", "candidate0", "logs", "12", env=env).code == 1
