"""A command whose server died, while another server answers at the same address: its lease is no affair of that one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.testing import ServerProcess, inherited_environment
from tests.preloaded import PreloadedPopen, run_preloaded
from tests.server.leasing import eventually

TTL_S = 0.6
GPU_POOL = (sys.executable, "-m", "gpu_worker_pool")


@contextmanager
def running(server: ServerProcess) -> Iterator[subprocess.Popen[str]]:
    """A command that waits, with a lease of this server."""
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    env = {**inherited_environment(os.environ), "GPU_POOL_SOCKET": "", "GPU_SERVICE_ENDPOINT": server.url}
    env["GPU_POOL_TTL"] = str(TTL_S)
    # It counts its own time, so that the outage certainly lasts for several TTLs.
    script = f"trap '' INT; read line; sleep {4 * TTL_S}; echo still here; exec sleep 600"
    with PreloadedPopen([*GPU_POOL, "run", "--", "sh", "-c", script], env=env, text=True, **pipes) as run:
        try:
            eventually(lambda: active(server), "it has a lease")
            yield run
        finally:
            run.kill()


def active(server: ServerProcess) -> list[str]:
    return [lease["id"] for lease in server.json("/leases")["leases"] if lease["state"] == "active"]


def told(run: subprocess.Popen[str], text: str) -> str:
    """The next line of the command's standard error with this text."""
    assert run.stderr is not None
    seen = []
    for line in run.stderr:
        seen.append(line)
        if text in line:
            return line
    raise AssertionError(f"{text!r} was not said: {seen}")


def goes_on(run: subprocess.Popen[str]) -> bool:
    assert run.stdin is not None
    assert run.stdout is not None
    run.stdin.write("on\n")
    run.stdin.flush()
    return run.stdout.readline() == "still here\n"


def test_a_server_with_another_journal_ends_no_lease_that_it_did_not_grant() -> None:
    with ServerProcess() as first, running(first) as run:
        (lease_id,) = active(first)
        first.kill()
        with ServerProcess(port=first.port):
            assert lease_id in told(run, "another server answers at")
            assert goes_on(run)
        first.start()
        assert active(first) == [lease_id]
        assert first.ask(f"/leases/{lease_id}?reason=the+demo", "DELETE").status == 200
        assert f"it was released by {user_name()}: the demo" in told(run, "it was released")
        assert run.wait() == 125, "the server that granted it is believed"


def test_the_port_does_not_stand_in_for_a_dead_socket() -> None:
    """The port may be that of another user by now, who must not get what is meant for the server of that socket."""
    with TemporaryDirectory(prefix="gpu-pool-") as place:
        dead = Path(place, "run", "pool.sock")
        with ServerProcess({"GPU_POOL_SOCKET": str(dead)}) as mortal:
            mortal.kill()
        with ServerProcess() as server:
            env = {**inherited_environment(os.environ), "GPU_POOL_SOCKET": str(dead)}
            command = [*GPU_POOL, "run", "--endpoint", server.url, "--", "echo", "ran"]
            done = run_preloaded(command, env=env)
    assert f"cannot connect to the socket {dead}: Connection refused; restart its server" in done.stderr
    assert (done.returncode, done.stdout) == (125, "")
