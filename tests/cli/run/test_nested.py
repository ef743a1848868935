"""`gpu-pool run`, `batch` and the Python client inside a `gpu-pool run`: they use the GPUs of the lease around them."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.cli.own_process import GPU_POOL, environment, gpu_pool, start_gpu_pool
from tests.cli.run.test_run import end, is_alive, read_line, the_lease
from tests.preloaded import stand_in
from tests.server.leasing import eventually, wait_until_free

SHOW_BOTH = "echo $CUDA_VISIBLE_DEVICES $GPU_POOL_LEASE_ID"
SHOW = f"sh -c '{SHOW_BOTH}'"
TWO_CLIENTS = """
from gpu_worker_pool import GPUWorkerPool
with GPUWorkerPool() as pool:
    first, second = pool.request_gpu(), pool.request_gpu()
    print(first.gpu_id, second.gpu_id, sep="\\n")
    pool.release_gpu(first)
    pool.release_gpu(second)
"""
PYTHON = "from gpu_worker_pool import gpu\nwith gpu(20{}) as a: print(a.env['CUDA_VISIBLE_DEVICES'], a.lease_id)"


@pytest.fixture(scope="module")
def run() -> str:
    """In a script: `gpu-pool run -q`, without the time to load it."""
    return shlex.join([*stand_in(), "-m", "gpu_worker_pool", "run", "-q"])


def python(options: str = "") -> str:
    return shlex.join([*stand_in(), "-c", PYTHON.format(options)])


def outer(server: ServerProcess, script: str, *options: str) -> list[list[str]]:
    """The words of each line that the script writes, run on one GPU; the first line is the outer lease's."""
    done = gpu_pool("run", *options, "--", "sh", "-ec", f"{SHOW}\n{script}", server=server)
    assert done.code == 0, done.err
    return [line.split() for line in done.out.splitlines()]


def test_a_run_and_a_python_client_inside_a_run_use_its_gpu(server: ServerProcess, run: str) -> None:
    outer_one, *inner = outer(server, f"{run} -- {SHOW}\n{python()}\n{run} -- {run} -- {SHOW}")
    assert inner == [outer_one] * 3, "without a lease of its own"


def test_inside_a_run_on_a_share_the_share_is_used(server: ServerProcess, run: str) -> None:
    more = f"{run} --memory 5GB -- true || echo refused"
    share, whole, smaller, refused = outer(
        server, f"{run} -- {SHOW}\n{run} --memory 1GB -- {SHOW}\n{more}", "--memory", "4GB"
    )
    assert share == whole == smaller
    assert refused == ["refused"]


def test_a_value_that_the_user_set_inside_counts_with_new_and_is_refused_in_one_line_without(
    server: ServerProcess,
    run: str,
) -> None:
    other = "CUDA_VISIBLE_DEVICES=$((1 - CUDA_VISIBLE_DEVICES))"
    same = f"CUDA_VISIBLE_DEVICES=0$CUDA_VISIBLE_DEVICES {run} --new --timeout 0 -- {SHOW} || echo waits"
    (gpu, _), (new, _), waits = outer(server, f"{other} {run} --new -- {SHOW}\n{same}")
    assert int(new) == 1 - int(gpu)
    assert waits == ["waits"], "0 before its number: not as the lease set it"

    refused = gpu_pool("run", "-q", "--", "sh", "-c", f"{other} {run} -- true", server=server)
    assert len(refused.err.splitlines()) == 1
    assert "names no GPU of the lease around this command, which has GPU" in refused.err


OWN_PARENT = """
import os, subprocess, sys
from gpu_worker_pool import gpu
with gpu() as g:
    sys.exit(subprocess.run([sys.executable, "-m", "gpu_worker_pool", "run", "true"], env={**os.environ, **g.env}).returncode)
"""


def test_a_run_that_would_wait_for_the_program_that_started_it_says_so(server: ServerProcess) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OWN_PARENT], env=environment(server), capture_output=True, text=True, check=False
    )
    assert (done.returncode, "would wait for its own parent" in done.stderr) == (125, True)


def test_inside_several_gpus_a_run_sees_all_and_a_python_client_as_many_as_it_asks_for(
    server: ServerProcess, run: str
) -> None:
    two = shlex.join([*stand_in(), "-c", TWO_CLIENTS])
    around, inner, first, second = outer(server, f"{run} -- {SHOW}\n{two}", "--gpus", "2")
    assert inner == around
    assert sorted(first + second) == around[0].split(",")


def test_the_gpus_of_the_lease_around_it_are_named(server: ServerProcess) -> None:
    run = shlex.join([*GPU_POOL, "run"])
    done = gpu_pool("run", "--quiet", "--gpus", "2", "--", "sh", "-c", f"{run} -- true", server=server)
    assert re.search(
        r"^gpu-pool: GPUs \d, \d of the lease [0-9a-f]+, inside which this runs", done.err, re.MULTILINE
    ), done.err


def test_what_the_lease_cannot_satisfy_is_refused_with_advice(server: ServerProcess, run: str) -> None:
    done = gpu_pool("run", "--", "sh", "-c", f"{run} --gpus 2 -- true", server=server)
    assert done.code != 0
    assert "--new" in done.err
    assert "not 2 GPUs" in done.err


def test_killed_with_9_the_outer_run_takes_the_inner_one_with_it(server: ServerProcess) -> None:
    run = shlex.join([*GPU_POOL, "run", "-q"])  # the processes are those that a user has
    process = start_gpu_pool("run", "--", "sh", "-c", f"{run} -- sh -c 'echo $$; exec sleep 600'; true", server=server)
    command = int(read_line(process))
    process.send_signal(signal.SIGKILL)
    end(process)
    eventually(lambda: not is_alive(command), "the end of the inner one")
    wait_until_free(server)


def test_with_the_outer_guard_killed_nothing_of_the_inner_command_lives_on(server: ServerProcess) -> None:
    run = shlex.join([*GPU_POOL, "run", "-q"])  # the processes are those that a user has
    inner = "setsid sh -c 'trap \"\" TERM; echo $$; exec sleep 600' & wait"
    process = start_gpu_pool("run", "-q", "--", "sh", "-c", f'{run} -- sh -c "$0"; true', inner, server=server)
    orphan = int(read_line(process))
    guard = the_lease(server)["pid"]
    assert isinstance(guard, int)
    os.kill(guard, signal.SIGKILL)
    assert end(process) == 125
    assert not is_alive(orphan)


# Says when it begins and when it ends; another one at the same time would be seen in between.
BUSY = "sh -c 'echo begins >>log; sleep 0.3; echo ends >>log'"


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="ascii").split()


def test_two_at_once_inside_one_gpu_wait_for_each_other(server: ServerProcess, run: str, tmp_path: Path) -> None:
    python_too = shlex.join(
        [*stand_in(), "-c", "import os; from gpu_worker_pool import gpu\nwith gpu(20): os.system(os.environ['BUSY'])"]
    )
    script = f"{run} -- {BUSY} & {run} -- {BUSY} & {python_too} & wait"
    done = gpu_pool("run", "--", "sh", "-c", script, server=server, cwd=tmp_path, env={"BUSY": BUSY})
    assert done.code == 0, done.err
    assert lines_of(tmp_path / "log") == ["begins", "ends"] * 3


def test_with_an_amount_of_memory_they_share_the_gpu(server: ServerProcess, run: str, tmp_path: Path) -> None:
    meet = "sh -c 'touch $0; until [ -e a ] && [ -e b ]; do sleep 0.02; done'"
    script = f"{run} --memory 1GB -- {meet} a & {run} --memory 1GB -- {meet} b & wait"
    assert gpu_pool("run", "--", "sh", "-c", script, server=server, cwd=tmp_path).code == 0


def test_a_wait_inside_a_lease_ends_with_its_timeout_and_with_the_death_of_the_other(
    server: ServerProcess, tmp_path: Path
) -> None:
    run = shlex.join([*GPU_POOL, "run"])  # the processes are those that a user has
    go = tmp_path / "go"
    os.mkfifo(go)
    holds = f"{run} -q --grace 0s -- sh -c 'echo holds; exec sleep 600' & echo $!"
    waits = f"{run} --timeout 1 -- true; echo $?; {run} -q -- echo free"
    process = start_gpu_pool("run", "-q", "--", "sh", "-c", f"{holds}; read x <{go}; {waits}", server=server)
    said = {read_line(process), read_line(process)}
    go.write_text("\n", encoding="ascii")
    assert read_line(process) == "124"
    os.kill(int(next(iter(said - {"holds"}))), signal.SIGKILL)
    assert read_line(process) == "free"
    assert process.stderr is not None
    assert "other programs inside the lease" in process.stderr.read()
    assert end(process) == 0


def test_the_jobs_of_a_batch_inside_a_run_take_turns_on_its_gpu(server: ServerProcess, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    jobs.write_text('echo "on $CUDA_VISIBLE_DEVICES"\n' * 3, encoding="utf-8")
    batch = shlex.join([*stand_in(), "-m", "gpu_worker_pool", "batch", str(jobs)])
    outer_one, *_ = outer(server, f"{batch} >/dev/null")
    logs = [path.read_text(encoding="utf-8") for path in (tmp_path / "jobs.logs").iterdir()]
    assert [f"on {outer_one[0]}\n" in log for log in logs] == [True] * 3


TESTS = """
import os
import pytest

AROUND = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "GPU_POOL_LEASE_ID", "GPU_POOL_LEASE_URL")}

def test_it(gpu):
    assert os.environ["CUDA_VISIBLE_DEVICES"] == AROUND["CUDA_VISIBLE_DEVICES"] == str(gpu.gpu_id)
    assert gpu.lease_id == AROUND["GPU_POOL_LEASE_ID"]

def test_it_again(gpu):
    test_it(gpu)

@pytest.mark.gpu(gpus=2)
def test_more_than_the_lease_has(gpu): ...
"""


@pytest.mark.parametrize("has_option", [False, True])
def test_the_fixture_of_the_pytest_plugin_uses_the_lease_around_it(
    server: ServerProcess, tmp_path: Path, has_option: bool
) -> None:
    (tmp_path / "test_inner.py").write_text(TESTS, encoding="ascii")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="ascii")
    pytest_ = (sys.executable, "-m", "pytest", "-rA", "-p", "gpu_worker_pool.pytest_plugin", "-p", "no:cacheprovider")
    options = ("--gpu-endpoint", server.url) if has_option else ()
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "400"}
    done = gpu_pool("run", "-e", server.url, "--", *pytest_, *options, cwd=tmp_path, env=env)
    found = [line for line in done.out.splitlines() if line.startswith(("PASSED", "FAILED", "ERROR"))]
    assert [line.split()[:2] for line in found] == [
        ["PASSED", "test_inner.py::test_it"],
        ["PASSED", "test_inner.py::test_it_again"],
        ["ERROR", "test_inner.py::test_more_than_the_lease_has"],
    ], done.out
    assert "not 2 GPUs" in found[-1]
    assert "request more GPUs there (--gpus)" in done.out
