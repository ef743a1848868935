"""`gpu-pool run` in a pid namespace of its own, with its own /proc, with that of the machine, or with none."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.cli.own_process import GPU_POOL, MOST_S, environment

UNSHARE = ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child"]
STUBBORN = "setsid sh -c 'trap \"\" TERM; while :; do sleep 0.1; done' & exec true"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    tried = subprocess.run([*UNSHARE, "--mount", "true"], check=False, capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"no pid namespace can be made here: {tried.stderr.strip()}")
    with ServerProcess({"SIMULATED_GPUS": "1"}) as running:
        yield running


def inside(server: ServerProcess, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*UNSHARE, *command], env=environment(server), capture_output=True, text=True, timeout=MOST_S, check=False
    )


def test_with_its_own_proc_all_that_the_command_left_is_ended(server: ServerProcess) -> None:
    # What lived on would be seen by `kill -0 -1`: it is the only other process in the namespace.
    script = (
        f'{" ".join(GPU_POOL)} run --grace 0.1s -- sh -c "$0"; echo "code $?"; kill -0 -1 2>&1 || echo nothing left'
    )
    done = inside(server, "--mount-proc", "sh", "-c", script, STUBBORN)
    assert done.stdout.splitlines()[0] == "code 0", done.stderr
    assert "nothing left" in done.stdout


@pytest.mark.parametrize("mount", ["true", "mount -t tmpfs none /proc"], ids=["of-the-machine", "none"])
def test_without_a_proc_that_shows_it_the_command_is_not_started(server: ServerProcess, mount: str) -> None:
    script = f'{mount} && {" ".join(GPU_POOL)} run --remote -- sh -c "echo ran"'
    done = inside(server, "--mount", "sh", "-c", script)
    assert done.returncode == 125
    assert "mount the /proc" in done.stderr
    assert "ran" not in done.stdout
