"""`gpu-pool run --time` and `--preemptible`, in real processes: the warning, the end, what is said and the exit code."""

from __future__ import annotations

import re
import signal

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.cli.own_process import gpu_pool, start_gpu_pool
from tests.cli.run.test_run import STUBBORN, end, is_alive, read_line, the_lease
from tests.server import elsewhere
from tests.server.leasing import OFTEN, get, queue, take

# Ends when it is told to, and says so; with the code that it is given.
OBEDIENT = 'trap "echo saved; exit $1" TERM; echo ready; while :; do sleep 0.02; done'


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


# --- while it waits --------------------------------------------------------------------------------------------------


@pytest.fixture
def full(server: ServerProcess) -> ServerProcess:
    take(server, gpus=2, owner="carol", time_limit_s=3600, labels={"command": "train.py"})
    return server


def test_a_wait_says_when_it_will_probably_be_over(full: ServerProcess) -> None:
    process = start_gpu_pool("run", "--", "true", server=full)
    assert process.stderr is not None
    line = process.stderr.readline()
    starts = r"starts by (\w{3} )?\d\d:\d\d\. carol 2 since (\w{3} )?\d\d:\d\d$"
    assert re.search(rf"^gpu-pool: waiting \d+s for 1 GPU \(1st of 1\), {starts}", line), line
    process.send_signal(signal.SIGTERM)
    assert end(process) == 128 + signal.SIGTERM
