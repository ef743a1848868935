"""`gpu-pool run --time` and `--preemptible`, in real processes: the warning, the end, what is said and the exit code."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from datetime import datetime, timedelta
from typing import Any

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.cli.own_process import gpu_pool, start_gpu_pool
from tests.cli.run.test_run import STUBBORN, end, is_alive, read_line, the_lease
from tests.server import elsewhere
from tests.server.leasing import OFTEN, eventually, get, queue, take

# Ends when it is told to, and says so; with the code that it is given.
OBEDIENT = 'trap "echo saved; exit $1" TERM; echo ready; while :; do sleep 0.02; done'


def events_of(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    assert process.stderr is not None
    return [json.loads(line) for line in process.stderr]


def test_a_command_that_does_not_end_is_killed_at_its_limit(server: ServerProcess) -> None:
    process = start_gpu_pool("run", "--time", "2s", "--grace", "1h", "--", "sh", "-c", STUBBORN, server=server)
    command = int(read_line(process))
    lease_id = the_lease(server)["id"]
    assert process.stderr is not None
    said = process.stderr.read()
    assert end(process) == 123
    assert not is_alive(command)
    assert re.search(r"GPU \d granted until [A-Za-z0-9: -]+\n", said)
    assert re.search(r"the lease ends at \d\d:\d\d \(time limit\); the command got SIGTERM\n", said)
    assert "the command was stopped: the time limit of 2s is over\n" in said
    assert server.json(f"/leases/{lease_id}")["end_reason"] == "time_limit"


@pytest.mark.parametrize("code", ["0", "9"])
def test_a_command_that_ends_after_the_warning_ends_as_it_wants(server: ServerProcess, code: str) -> None:
    done = gpu_pool("run", "--time", "20s", "--", "sh", "-c", OBEDIENT, "sh", code, server=server)
    assert (done.code, done.out) == (int(code), "ready\nsaved\n")


def test_a_command_that_knows_nothing_of_it_ends_on_the_warning(server: ServerProcess) -> None:
    process = start_gpu_pool("run", "--time", "2", "--json", "--", "sleep", "1000", server=server)
    granted, ending, stopped, ended = events_of(process)
    assert end(process) == 123
    assert [event["event"] for event in (granted, ending, stopped, ended)] == ["granted", "ending", "stopped", "ended"]
    assert ending["reason"] == stopped["reason"] == "time_limit"
    at, told = (datetime.fromisoformat(event["ends_at"]) for event in (granted, ending))
    assert abs(at - told) < timedelta(seconds=1)
    assert stopped["message"] == "the time limit of 2s is over"
    assert ended["exit_code"] == 123


def test_where_gpu_pool_is_stopped_the_guard_keeps_the_limit(server: ServerProcess) -> None:
    arguments = ("--time", "2s", "--grace", "0.1s", "--", "sh", "-c", STUBBORN)
    process = start_gpu_pool("run", *arguments, server=server)
    command = int(read_line(process))
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: not is_alive(command), "the guard has killed it")
    process.send_signal(signal.SIGCONT)
    assert end(process) == 123


def test_on_another_machine_it_is_gone_when_the_gpu_is_granted_again() -> None:
    with ServerProcess({"SIMULATED_GPUS": "1", **OFTEN}, command=elsewhere.COMMAND) as server:
        process = start_gpu_pool("run", "--time", "4s", "--", "sh", "-c", STUBBORN, server=server)
        command, lease_id = int(read_line(process)), the_lease(server)["id"]
        waiter = queue(server)
        assert get(server, waiter["id"], wait_s=30)["state"] == "active"
        assert not is_alive(command)
        assert end(process) == 123
        assert server.json(f"/leases/{lease_id}")["end_reason"] == "time_limit"


def test_a_preemptible_command_leaves_its_gpu_to_another_request() -> None:
    with ServerProcess({"SIMULATED_GPUS": "1", "GPU_POOL_PREEMPT_GRACE": "1", **OFTEN}) as server:
        process = start_gpu_pool("run", "--preemptible", "--", "sh", "-c", STUBBORN, server=server)
        command = int(read_line(process))
        waiter = queue(server)
        assert get(server, waiter["id"], wait_s=30)["state"] == "active"
        assert process.stderr is not None
        said = process.stderr.read()
        assert end(process) == 122
        assert not is_alive(command)
    assert "(preempted: another request needs its GPUs); the command got SIGTERM" in said
    assert "the command was stopped: preempted: another request needed the GPU" in said


@pytest.mark.parametrize("span", ["0", "400d", "soon"])
def test_a_bad_limit_is_our_failure(server: ServerProcess, span: str) -> None:
    done = gpu_pool("run", "--time", span, "--", "true", server=server)
    assert done.code == 125
    assert "time" in done.err
    assert "Traceback" not in done.err


# --- while it waits --------------------------------------------------------------------------------------------------


@pytest.fixture
def full(server: ServerProcess) -> ServerProcess:
    take(server, gpus=2, owner="carol", time_limit_s=3600, labels={"command": "train.py"})
    return server


def test_a_wait_says_when_it_will_probably_be_over(full: ServerProcess) -> None:
    process = start_gpu_pool("run", "--", "true", server=full)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert re.search(r"; probably at (\w{3} )?\d\d:\d\d, if carol's job \(train\.py\) ends when it said$", line), line
    process.send_signal(signal.SIGTERM)
    assert end(process) == 128 + signal.SIGTERM


def test_the_same_as_json(full: ServerProcess) -> None:
    process = start_gpu_pool("run", "--json", "--", "true", server=full)
    assert process.stderr is not None
    waiting = json.loads(process.stderr.readline())
    process.send_signal(signal.SIGTERM)
    assert end(process) == 128 + signal.SIGTERM
    assert (waiting["event"], waiting["position"]) == ("waiting", 1)
    assert (waiting["expected_start_basis"], waiting["expected_after"]) == ("declared", "carol (train.py)")
    assert waiting["expected_start_at"] in {lease["ends_at"] for lease in full.json("/leases")["leases"]}
