"""`gpu-pool hold` and `env`: GPUs without a command, on a real server with simulated GPUs."""

from __future__ import annotations

import getpass
import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.cli.in_process import called
from tests.cli.own_process import GPU_POOL, environment, gpu_pool, start_gpu_pool
from tests.cli.terminal import Terminal
from tests.other_user import ALICE, python_as
from tests.server.leasing import eventually


@pytest.fixture
def outsiders(tmp_path: Path) -> Path:
    file = tmp_path / "outsiders.json"
    file.write_text("{}")
    return file


@pytest.fixture
def server(outsiders: Path) -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "2", "SIMULATED_OUTSIDERS": str(outsiders)}) as running:
        yield running


def exported(text: str) -> dict[str, str]:
    return dict(line.removeprefix("export ").split("=", 1) for line in text.splitlines())


def leases(server: ServerProcess) -> list[dict[str, object]]:
    found: list[dict[str, object]] = server.json("/leases")["leases"]
    return found


def test_a_held_gpu_outlives_the_command_and_the_server_and_is_released_by_its_id(server: ServerProcess) -> None:
    held = gpu_pool("hold", "--time", "2h", server=server)
    assert (held.code, "is yours until" in held.err) == (0, True), held.err
    variables = exported(held.out)
    server.kill()
    server.start()
    (lease,) = leases(server)
    assert (lease["id"], lease["state"], lease["time_limit_s"]) == (variables["GPU_POOL_LEASE_ID"], "active", 7200.0)
    # Another terminal joins it; commands of the pool there use its GPU.
    joined = called("env", server=server)
    assert exported(joined.out) == variables
    assert called("env", "--json", server=server).json["id"] == lease["id"]
    inside = gpu_pool("run", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES", server=server, env=variables)
    assert (inside.code, inside.out.strip()) == (0, variables["CUDA_VISIBLE_DEVICES"]), inside.err
    assert called("release", variables["GPU_POOL_LEASE_ID"][:8], server=server).code == 0
    assert [lease for lease in leases(server) if lease["state"] == "active"] == []


@pytest.mark.parametrize(
    ("shell", "line"), [("fish", "set -gx CUDA_VISIBLE_DEVICES "), ("csh", "setenv CUDA_VISIBLE_DEVICES ")]
)
def test_other_shells_have_their_own_words(server: ServerProcess, shell: str, line: str) -> None:
    assert line in called("hold", "--shell", shell, server=server).out


def test_the_time_is_that_of_the_setting_where_none_is_given(server: ServerProcess) -> None:
    assert called("hold", server=server, env={"GPU_POOL_HOLD": "90m"}).code == 0
    assert called("hold", "--memory", "4GB", server=server).code == 0
    assert [lease["time_limit_s"] for lease in leases(server)] == [5400.0, 28800.0]


def test_its_time_limit_ends_it(server: ServerProcess) -> None:
    assert called("hold", "--time", "1s", server=server).code == 0
    eventually(lambda: not leases(server), "its time is over")
    (lease,) = called("history", "--json", server=server).json["leases"]
    assert lease["end_reason"] == "time_limit"


def test_without_a_free_gpu_it_waits_or_leaves_the_queue(server: ServerProcess) -> None:
    assert called("hold", "--gpus", "2", server=server).code == 0
    refused = called("hold", "--no-wait", server=server)
    assert (refused.code, "no GPU is free now: 2 leased by" in refused.err, refused.out) == (124, True, ""), refused.err
    assert len(leases(server)) == 1
    # Nothing else tells the server that nobody waits any more: the request has no process.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        with start_gpu_pool("hold", server=server) as waiting:
            assert waiting.stderr is not None
            assert "waiting: Position 1 of 1" in waiting.stderr.readline()
            waiting.send_signal(number)
            assert waiting.wait(timeout=30) != 0
        assert len(server.json("/pool")["queue"]) == 0


def test_a_program_that_was_started_by_hand_is_adopted_and_frees_its_gpu_when_it_ends(
    server: ServerProcess, outsiders: Path
) -> None:
    with ExitStack() as stack:
        program = stack.enter_context(subprocess.Popen(["/bin/sleep", "600"]))
        stack.callback(program.kill)
        owner = getpass.getuser()
        process = {
            "pid": program.pid,
            "name": "train.py",
            "user": owner,
            "memory_mb": 20_000,
            "utilization_percent": 50,
        }
        outsiders.write_text(json.dumps({"0": [process], "1": [process]}))
        eventually(lambda: server.json("/pool")["gpus"][1]["processes"], "the program is seen")
        held = called("hold", "--pid", str(program.pid), "--no-wait", "--json", server=server)
        assert held.code == 0, held.err
        adopted = leases(server)
        assert [lease["id"] for lease in held.json["leases"]] == [lease["id"] for lease in adopted]
        facts = [(lease["owner"], lease["pid"], lease["is_local"], lease["time_limit_s"]) for lease in adopted]
        assert facts == [(owner, program.pid, True, None)] * 2
        outsiders.write_text("{}")
        program.kill()
        eventually(lambda: not leases(server), "the lease ends with it")
    assert {server.ask(f"/leases/{lease['id']}").json["end_reason"] for lease in adopted} == {"holder_died"}


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (("hold", "--pid", "1"), "uses no GPU that the server sees", 1),
        (("hold", "--pid", "4194304"), "does not run on this machine", 1),
        (("hold", "--time", "30d"), "--time must be 1 second to 7 days", 2),
        (("env",), "you hold no GPU", 1),
        (("env", "nothing"), "you hold no lease nothing", 1),
    ],
)
def test_what_cannot_be_is_said_and_nothing_is_held(
    server: ServerProcess, arguments: tuple[str, ...], said: str, code: int
) -> None:
    done = called(*arguments, server=server)
    assert (done.code, said in done.err, done.out) == (code, True, ""), done.err
    assert [lease for lease in leases(server) if lease["state"] == "active"] == []
    bad = called("hold", server=server, env={"GPU_POOL_HOLD": "soon"})
    assert (bad.code, "GPU_POOL_HOLD" in bad.err) == (2, True)


def test_of_several_held_leases_one_must_be_named(server: ServerProcess) -> None:
    ids = [called("hold", "--json", server=server).json["id"] for _ in range(2)]
    several = called("env", server=server)
    assert (several.code, all(lease_id[:8] in several.err for lease_id in ids)) == (2, True), several.err
    assert exported(called("env", ids[1], server=server).out)["GPU_POOL_LEASE_ID"] == ids[1]


@pytest.mark.parametrize("shell", ["/bin/bash", "/bin/sh"])
def test_a_shell_has_gpus_in_its_prompt_other_terminals_join_it_and_its_end_releases_them(
    server: ServerProcess, shell: str, tmp_path: Path
) -> None:
    env = environment(server, {"SHELL": shell, "HOME": str(tmp_path)})
    with Terminal([*GPU_POOL, "shell", "--gpus", "2"], env) as terminal:
        terminal.wait_for("(gpu 0,1) ")
        terminal.type("echo sees=$CUDA_VISIBLE_DEVICES\n")
        terminal.wait_for("sees=0,1")
        (lease,) = leases(server)
        assert (lease["state"], lease["labels"]) == ("active", {"command": "shell"})
        joined = called("env", server=server)
        assert exported(joined.out)["GPU_POOL_LEASE_ID"] == lease["id"]
        terminal.type("exit 7\n")
        assert terminal.wait() == 7
    assert [each for each in leases(server) if each["state"] == "active"] == []


def test_wishes_choose_among_the_gpus_and_what_none_has_is_refused(server: ServerProcess) -> None:
    assert [gpu["gpu_id"] for gpu in called("hold", "--exclude", "0", "--json", server=server).json["gpus"]] == [1]
    assert [gpu["gpu_id"] for gpu in called("hold", "--gpu", "0", "--json", server=server).json["gpus"]] == [0]
    for command in (("hold",), ("shell",), ("run", "--", "true"), ("submit", "--", "true")):
        refused = gpu_pool(command[0], "--min-memory", "900GB", *command[1:], server=server)
        assert refused.code != 0, command
        assert "900 GB" in refused.err or "900.0 GiB" in refused.err or "921600" in refused.err, (command, refused.err)


def test_the_program_of_another_user_is_not_adopted(server: ServerProcess) -> None:
    with subprocess.Popen(["/bin/sleep", "600"]) as program:
        try:
            command = python_as(ALICE, "-m", "gpu_worker_pool", "hold", "--pid", str(program.pid))
            env = {"PATH": "/usr/bin", "GPU_SERVICE_ENDPOINT": server.url}
            done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=env, check=False)
        finally:
            program.kill()
    assert (done.returncode, f"pid {program.pid} belongs to {getpass.getuser()}" in done.stderr) == (1, True), (
        done.stderr
    )
    assert leases(server) == []
