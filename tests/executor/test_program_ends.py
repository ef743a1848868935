"""Programs with an executor that end: by themselves, by Ctrl-C in a terminal, by a signal, or before they began."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.cli.terminal import Terminal
from tests.processes import has_ended
from tests.server.leasing import eventually
from tests.server.running import ROOT

from .test_leases import active
from .work import Gate

PRELUDE = """
import atexit, os, sys, time
from gpu_worker_pool import GPUExecutor
from tests.executor import work

path = sys.argv[1]

def say(text):
    print(text, flush=True)
"""


@pytest.fixture
def env(server: ServerProcess) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "GPU_SERVICE_ENDPOINT": server.url}


def script(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(PRELUDE + textwrap.dedent(text), encoding="utf-8")
    return path


@contextmanager
def running(folder: Path, env: dict[str, str], gate: Gate, text: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(script(folder, text)), gate.path]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_program_ends_when_its_tasks_are_done_and_takes_no_more_at_its_end(
    server: ServerProcess, tmp_path: Path, env: dict[str, str], gate: Gate
) -> None:
    program = """
        def run_last():
            try:
                ex.submit(abs, 1)
            except RuntimeError as error:
                say(error)

        if __name__ == "__main__":
            atexit.register(run_last)
            ex = GPUExecutor(1)
            ex.submit(work.report, path).add_done_callback(lambda future: say(future.result()))
            ex.submit(say, "the last")
    """
    with running(tmp_path, env, gate, program) as process:
        gate.wait().let_go("the first")
        out, err = process.communicate()

    assert out.splitlines() == ["the first", "the last", "cannot schedule new futures after interpreter shutdown"]
    assert (process.returncode, err) == (0, "")
    assert active(server) == []


def test_ctrl_c_cancels_what_waits_interrupts_what_runs_and_ends_the_program(
    server: ServerProcess, tmp_path: Path, env: dict[str, str], gate: Gate
) -> None:
    program = """
        if __name__ == "__main__":
            futures = []
            try:
                with GPUExecutor(1) as ex:
                    futures += [ex.submit(work.report_when_interrupted, path) for _ in range(3)]
                    futures[0].result()
            finally:
                say([type(f.exception()).__name__ if not f.cancelled() else "cancelled" for f in futures])
    """
    with Terminal([sys.executable, str(script(tmp_path, program)), gate.path], env) as terminal:
        task = gate.wait()
        terminal.type("\x03")
        interrupted = gate.wait()
        assert (interrupted.pid, interrupted.says) == (task.pid, "interrupted")
        interrupted.let_go()  # it may save its work
        terminal.wait()

    shown = terminal.text
    assert "['KeyboardInterrupt', 'cancelled', 'cancelled']" in shown
    assert shown.rstrip().endswith("KeyboardInterrupt")
    assert shown.count("Traceback") == 1  # that of the program, and none of a worker
    assert has_ended(task.pid)
    assert active(server) == []


@pytest.mark.parametrize("last", ["", "ex.submit(abs, 1).result()"])
def test_ctrl_c_in_a_program_without_a_with_block_ends_its_tasks(
    server: ServerProcess, tmp_path: Path, env: dict[str, str], gate: Gate, last: str
) -> None:
    """Whether it waits for a result, or at its end for all tasks."""
    program = f"""
        if __name__ == "__main__":
            ex = GPUExecutor(1)
            ex.submit(work.report, path)
            say("end")
            {last}
    """
    with Terminal([sys.executable, str(script(tmp_path, program)), gate.path], env) as terminal:
        task = gate.wait()
        terminal.wait_for("end")
        terminal.type("\x03")
        assert terminal.wait() == -signal.SIGINT
    assert b"KeyboardInterrupt" in terminal.all_output
    assert has_ended(task.pid)
    assert active(server) == []


@pytest.mark.parametrize("times", [2, 3])
def test_a_second_ctrl_c_ends_what_ignores_the_first_whatever_its_grace_and_a_third_is_harmless(
    server: ServerProcess, tmp_path: Path, env: dict[str, str], gate: Gate, times: int
) -> None:
    program = """
        if __name__ == "__main__":
            with GPUExecutor(1, grace_s=1000) as ex:
                future = ex.submit(work.report_and_stay, path)
                future.add_done_callback(lambda future: say(type(future.exception()).__name__))
                future.result()
    """
    with Terminal([sys.executable, str(script(tmp_path, program)), gate.path], env) as terminal:
        task = gate.wait()
        terminal.type("\x03")
        assert gate.wait().says == "interrupted"
        for _ in range(times - 1):
            terminal.type("\x03")
        assert terminal.wait() == -signal.SIGINT

    assert b"WorkerLostError" in terminal.all_output
    assert has_ended(task.pid)
    assert active(server) == []


def test_a_killed_program_takes_its_workers_with_it_while_a_fork_of_it_lives(
    server: ServerProcess, tmp_path: Path, env: dict[str, str], gate: Gate
) -> None:
    program = """
        if __name__ == "__main__":
            with GPUExecutor(1, grace_s=0.2) as ex:
                future = ex.submit(work.report, path)
                work.report(path, "not forked")
                if os.fork() == 0:
                    work.report(path, "a fork")
                    os._exit(0)
                future.result()
    """
    with running(tmp_path, env, gate, program) as process:
        visitors = {visitor.says: visitor for visitor in (gate.wait(), gate.wait())}
        visitors["not forked"].let_go()
        fork = gate.wait()
        process.kill()
        assert has_ended(visitors[None].pid)
        eventually(lambda: active(server) == [], "the GPU is free")
        fork.let_go()


def test_an_executor_that_cannot_open_files_says_so_and_hangs_nothing(
    server: ServerProcess, tmp_path: Path, env: dict[str, str], gate: Gate
) -> None:
    """Whichever of the files that it opens is the first that is too many."""
    program = """
        import logging, resource
        if __name__ == "__main__":
            logging.disable()
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            with GPUExecutor(1) as ex:
                ex.submit(abs, 1).result()  # what is loaded late is loaded
            for number in range(40):
                ex = GPUExecutor(1, grace_s=0.2)
                opened = [int(name) for name in os.listdir("/proc/self/fd")]
                resource.setrlimit(resource.RLIMIT_NOFILE, (len(opened) - 1 + number, most))
                try:
                    outcome = ex.submit(abs, -1).exception()
                except OSError as error:
                    outcome = error
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
                ex.shutdown()
                say(f"{number} {type(outcome).__name__}")
    """
    with running(tmp_path, env, gate, program) as process:
        out, _ = process.communicate()

    assert process.returncode == 0
    outcomes = [line.split()[1] for line in out.splitlines()]
    assert (len(outcomes), outcomes[0], outcomes[-1]) == (40, "OSError", "NoneType")
    assert active(server) == []


def test_a_program_without_a_guard_for_its_main_module_is_told_so(
    server: ServerProcess, tmp_path: Path, env: dict[str, str], gate: Gate
) -> None:
    with running(tmp_path, env, gate, "with GPUExecutor(1) as ex:\n    ex.submit(abs, 1).result()\n") as process:
        _, err = process.communicate()

    assert process.returncode == 1
    assert "if __name__ == '__main__':" in err
    assert "ExecutorBrokenError: a worker could not start" in err
    assert active(server) == []


TYPED_IN = """
from gpu_worker_pool import GPUExecutor

class Number:
    def __init__(self, value):
        self.value = value

def square(number):
    return Number(number.value ** 2)

with GPUExecutor(1) as ex:
    print([number.value for number in ex.map(square, map(Number, range(3)))])
"""


def typed_in(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-"], env=env, input=TYPED_IN, capture_output=True, text=True, check=False)


def test_functions_that_were_typed_in_are_tasks_with_cloudpickle(server: ServerProcess, env: dict[str, str]) -> None:
    pytest.importorskip("cloudpickle", reason="cloudpickle is not installed")
    done = typed_in(env)
    assert (done.stdout, done.stderr) == ("[0, 1, 4]\n", "")


def test_without_cloudpickle_it_is_said_what_to_do(server: ServerProcess, env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "cloudpickle.py").write_text("raise ImportError", encoding="ascii")
    done = typed_in({**env, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert "square was defined in a notebook or an interactive session" in done.stderr.splitlines()[-1]
