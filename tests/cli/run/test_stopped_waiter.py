"""`gpu-pool run` that is stopped (Ctrl-Z) while it waits: it keeps its place, and no GPU."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_worker_pool.testing import COMMAND, ServerProcess
from tests.cli.own_process import MOST_S, ON_ANOTHER_MACHINE, end_all, start_gpu_pool
from tests.server.leasing import eventually, get, queued, release, take

SCRIPT = "echo {0} began >>log; until [ -e end-{0} ]; do sleep 0.02; done; echo {0} ended >>log"


@pytest.fixture(params=["local", "remote"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    command = ON_ANOTHER_MACHINE if request.param == "remote" else COMMAND
    with ServerProcess({"SIMULATED_GPUS": "1"}, command=command) as running:
        yield running
        end_all()


def test_a_stopped_waiter_keeps_its_place_and_no_gpu(server: ServerProcess, tmp_path: Path) -> None:
    holder = take(server, ttl_s=600)["id"]
    stopped, second, third = (wait(server, tmp_path, name) for name in ("stopped", "second", "third"))
    place = queued(server)
    os.kill(stopped.pid, signal.SIGSTOP)
    release(server, holder)
    eventually(lambda: log(tmp_path) == ["second began"], "the next waiter is served")
    assert queued(server) == [place[0], place[2]], "it has kept its place"

    os.kill(stopped.pid, signal.SIGCONT)
    eventually(lambda: "did not take up" not in reason(server, place[0]), "it has called again")
    for name in ("second", "stopped", "third"):
        eventually(lambda name=name: log(tmp_path)[-1] == f"{name} began", f"{name} is served")  # type: ignore[misc]
        (tmp_path / f"end-{name}").touch()
    for run in (stopped, second, third):
        _, said_at_last = run.communicate(timeout=MOST_S)
        assert run.returncode == 0, said_at_last
    assert log(tmp_path) == [f"{name} {what}" for name in ("second", "stopped", "third") for what in ("began", "ended")]
    assert get(server, place[0])["end_reason"] == "released"


def wait(server: ServerProcess, folder: Path, name: str) -> subprocess.Popen[str]:
    before = len(queued(server))
    run = start_gpu_pool("run", "--remote", "--", "sh", "-c", SCRIPT.format(name), server=server, cwd=folder)
    eventually(lambda: len(queued(server)) > before, f"{name} waits")
    return run


def reason(server: ServerProcess, lease_id: str) -> str:
    """Why it waits, from the list: to ask for the lease alone would be taken for a call of its client."""
    found: str = next(lease["reason"] for lease in server.json("/leases")["leases"] if lease["id"] == lease_id)
    return found


def log(folder: Path) -> list[str]:
    file = folder / "log"
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []
