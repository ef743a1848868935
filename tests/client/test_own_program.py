"""What a Python program says of itself with a request, and what a notebook is told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.client.command_label import program_label, with_own_label
from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.testing import ServerProcess
from gpu_worker_pool.wire.bounds import MAX_LABELS, MAX_LABELS_BYTES
from tests.cli.own_process import environment


class ZMQInteractiveShell:
    pass


class TerminalInteractiveShell:
    pass


@pytest.mark.parametrize(
    ("argv", "module", "shell", "label"),
    [
        (["exp/train.py", "--key", "s3cret"], None, None, "train.py"),
        (["/usr/bin/pytest", "-q"], None, None, "pytest"),
        (["/x/my/module.py", "s3cret"], "my.module", None, "my.module"),
        (["/x/pytest/__main__.py"], "pytest.__main__", None, "pytest"),
        (["-c", "s3cret"], None, None, "python"),
        (["-", "s3cret"], None, None, "python"),
        ([""], None, None, "python"),
        ([], None, None, "python"),
        (["key=s3cret"], None, None, "python"),
        (["/x/ipykernel_launcher.py", "-f", "kernel.json"], "ipykernel_launcher", ZMQInteractiveShell(), "notebook"),
        (["/usr/bin/ipython"], None, TerminalInteractiveShell(), "ipython"),
    ],
)
def test_the_name_of_a_program(argv: list[str], module: str | None, shell: object, label: str) -> None:
    assert program_label(argv, module, shell) == label


def test_the_callers_labels_win() -> None:
    assert with_own_label({"run": "7"}).keys() == {"run", "command"}
    for own in ({"command": "mine"}, {"name": "the thesis"}):
        assert with_own_label(own) == own


def test_labels_that_a_server_accepts_are_accepted_still() -> None:
    many = {str(number): "x" for number in range(MAX_LABELS)}
    large = {"a" * 60: "x" * (MAX_LABELS_BYTES - 60)}
    assert (with_own_label(many), with_own_label(large)) == (many, large)
    wrong: Any = {"number": 7}  # the server says so
    assert with_own_label(wrong).items() >= wrong.items()


# --- in real processes -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "2"}) as running:
        yield running


PROGRAM = """
import sys
from gpu_worker_pool import gpu
with gpu(30, labels={"run": "7"}) as held: print(held.lease_id)
"""


def test_a_program_is_named_by_its_script_or_module(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM, encoding="ascii")

    def labels(*arguments: str) -> dict[str, str]:
        command = [sys.executable, *arguments, "--key", "s3cret"]
        env = environment(server)
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
        found: dict[str, str] = server.json(f"/leases/{done.stdout.strip()}")["labels"]
        return found

    assert labels("./train.py") == {"run": "7", "command": "train.py"}
    assert labels("-m", "train") == {"run": "7", "command": "train"}


# Each line of its input runs a cell. A cell that loses its GPU ends when the loss has been told.
NOTEBOOK = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell('''
import logging, sys, threading
from gpu_worker_pool import GPUWorkerPool
told = threading.Event()
pool = GPUWorkerPool(on_lost=lambda held: told.set())
pool.start()
def lose():
    told.clear()
    print(pool.request_gpu(30).lease_id, flush=True)
    told.wait()
    print("cell ended", file=sys.stderr, flush=True)
''')
for line in sys.stdin:
    shell.run_cell(line)
shell.run_cell("pool.stop()")
"""


def test_a_lease_lost_in_a_notebook_is_said_there_once(server: ServerProcess, tmp_path: Path) -> None:
    env = environment(server, {"IPYTHONDIR": str(tmp_path), "HOME": str(tmp_path)})
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", NOTEBOOK], env=env, text=True, **pipes) as notebook:
        out: Any = notebook.stdout
        err: Any = notebook.stderr

        def run(cell: str) -> list[str]:
            """What the notebook shows when the cell has lost its GPU."""
            print(cell, file=notebook.stdin, flush=True)
            lease_id = out.readline().strip()
            assert server.json(f"/leases/{lease_id}")["labels"] == {"command": "notebook"}
            server.ask(f"/leases/{lease_id}?reason=the%20demo", "DELETE")
            shown: list[str] = []
            while (line := err.readline()) != "cell ended\n":
                assert line, shown
                shown.append(line)
            return shown

        try:
            why = f"it was released by {user_name()}: the demo"
            (said,) = run("lose()")
            assert why in said
            (logged,) = run("logging.basicConfig(format='logged: %(message)s'); lose()")
            assert logged.startswith("logged: ")
            assert why in logged
            assert notebook.communicate(timeout=60) == ("", "")
        finally:
            notebook.kill()
