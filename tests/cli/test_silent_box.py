"""A box that accepts connections and answers nothing: no command waits for it while another box answers.

The commands may wait for a call far longer than these tests run, so a command that ends has not waited.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.cli.in_process import called
from tests.cli.own_process import MOST_S, ON_ANOTHER_MACHINE, gpu_pool, start_gpu_pool
from tests.server.leasing import eventually, queued, release_all, take, wait_until_free

NEVER = {"GPU_ENDPOINT_TIMEOUT": "3600"}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "2xA100-80GB"}) as running:
        yield running


@pytest.fixture
def silent_url() -> Iterator[str]:
    """A socket that listens on this machine; the connection is established, and nothing reads it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_status_shows_the_boxes_that_answer_and_names_the_silent_one(server: ServerProcess, silent_url: str) -> None:
    done = gpu_pool("status", "--endpoint", f"{silent_url},{server.url}", env=NEVER)
    assert done.code == 0, done.err
    assert "2 GPUs, 2 free, simulated" in done.out
    silent = next(line for line in done.out.splitlines() if silent_url in line)
    assert "it has not answered within" in silent


def test_status_as_json_shows_the_silent_one_as_not_up(server: ServerProcess, silent_url: str) -> None:
    endpoints = gpu_pool("status", "--json", "--endpoint", f"{silent_url},{server.url}", env=NEVER).json["endpoints"]
    assert [endpoint["error"] is None for endpoint in endpoints] == [False, True]
    assert "has not answered" in endpoints[0]["error"]


def test_a_command_runs_on_the_box_that_answers(server: ServerProcess, silent_url: str) -> None:
    both = f"{silent_url},{server.url}"
    done = gpu_pool("run", "--endpoint", both, "--", "sh", "-c", "echo on $GPU_POOL_LEASE_GPUS", env=NEVER)
    assert done.code == 0, done.err
    assert f"on 127.0.0.1-{server.port}:" in done.out
    quiet = gpu_pool("run", "-q", "--endpoint", both, "--", "true", env=NEVER)
    assert (quiet.code, quiet.err) == (0, "")


def test_a_box_that_answers_late_is_asked_all_the_same(server: ServerProcess) -> None:
    """A command does not wait for it at the start. It has not left it out, either: there it gets the GPU."""
    release_all(server)
    wait_until_free(server)
    for _ in range(2):
        take(server)
    with ServerProcess({"SIMULATED_GPUS": "1"}) as late:
        os.kill(late.pid, signal.SIGSTOP)
        waiting = start_gpu_pool("run", "--endpoint", f"{late.url},{server.url}", "--", "true", env=NEVER)
        eventually(lambda: queued(server) or None, "it waits at the other box")
        os.kill(late.pid, signal.SIGCONT)
        _, err = waiting.communicate(timeout=MOST_S)
        assert waiting.returncode == 0, err
        assert f"127.0.0.1-{late.port}:0" in err
    release_all(server)


def test_a_box_that_answers_late_from_another_machine_is_left_out(server: ServerProcess) -> None:
    """Its address is of this machine, as that of a tunnel. It is not asked, and the command waits here."""
    release_all(server)
    wait_until_free(server)
    held = [take(server) for _ in range(2)]
    with ServerProcess({"SIMULATED_GPUS": "1"}, command=ON_ANOTHER_MACHINE) as late:
        os.kill(late.pid, signal.SIGSTOP)
        both, shown = f"{late.url},{server.url}", "echo on $GPU_POOL_LEASE_GPUS"
        waiting = start_gpu_pool("run", "--endpoint", both, "--", "sh", "-c", shown, env=NEVER)
        eventually(lambda: queued(server) or None, "it waits at the other box")
        os.kill(late.pid, signal.SIGCONT)
        eventually(lambda: late.json("/pool") or None, "the late box answers")
        for lease in held:
            server.ask(f"/leases/{lease['id']}", "DELETE")
        out, err = waiting.communicate(timeout=MOST_S)
        assert waiting.returncode == 0, err
        assert out.startswith(f"on 127.0.0.1-{server.port}:"), "as `status` calls it with these endpoints"
        assert f"127.0.0.1-{late.port} is left out: its GPUs are in another machine" in err
    release_all(server)


def test_a_batch_runs_on_the_box_that_answers(server: ServerProcess, silent_url: str, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    jobs.write_text("true\ntrue\n")
    done = gpu_pool("batch", "--endpoint", f"{silent_url},{server.url}", str(jobs), env=NEVER)
    assert done.code == 0, done.err


@pytest.mark.parametrize(("command", "words"), [(("top",), ": 2 GPUs, "), (("jobs",), "")])
def test_what_shows_the_pool_does_not_wait(
    server: ServerProcess, silent_url: str, command: tuple[str, ...], words: str
) -> None:
    done = called(*command, "--endpoint", f"{silent_url},{server.url}", env=NEVER)
    assert done.code == 0, done.err
    assert words in done.out + done.err
