"""A fork of the loaded process is as a process of its own to the test that starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.preloaded import PreloadedPopen

STARTS = pytest.mark.parametrize("popen", [subprocess.Popen, PreloadedPopen])
SHOW = """
import os, sys
print(__name__, sys.argv, os.getcwd(), os.environ["SEEN"], os.getppid(), os.getpgid(0) == os.getpid(), flush=True)
print("error", file=sys.stderr)
assert sys.stdin.read() == "told"
sys.exit(7)
"""
ENV = {"PATH": os.environ["PATH"], "SEEN": "yes"}


@STARTS
def test_it_has_its_arguments_environment_folder_streams_parent_and_code(
    popen: type[subprocess.Popen[str]], tmp_path: Path
) -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SHOW, "one", "two"]
    with popen(command, env=ENV, cwd=tmp_path, stdin=pipe, stdout=pipe, stderr=pipe, text=True, process_group=0) as it:
        out, err = it.communicate("told", timeout=60)

    assert out == f"__main__ ['-c', 'one', 'two'] {tmp_path} yes {os.getpid()} True\n"
    assert (err, it.returncode) == ("error\n", 7)


@STARTS
def test_it_ends_by_a_signal_and_by_an_error(popen: type[subprocess.Popen[str]]) -> None:
    stay = [sys.executable, "-c", "print(flush=True); input()"]
    with popen(stay, env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        it.stdout.readline()
        it.terminate()
    assert it.returncode == -signal.SIGTERM

    with popen([sys.executable, "-c", "1 / 0"], env=ENV, stderr=subprocess.PIPE, text=True) as it:
        assert it.communicate()[1].endswith("ZeroDivisionError: division by zero\n")
    assert it.returncode == 1


@STARTS
def test_what_is_read_at_the_start_is_read(popen: type[subprocess.Popen[str]]) -> None:
    show = [sys.executable, "-c", "import sys; print(sys.stdout.encoding, sys.flags.optimize)"]
    env = {**ENV, "PYTHONIOENCODING": "latin-1", "PYTHONOPTIMIZE": "1"}
    with popen(show, env=env, stdout=subprocess.PIPE, text=True) as it:
        assert it.communicate()[0].split() == ["iso8859-1", "1"]


ENDS = """
import atexit, sys, threading
class Open:
    def __del__(self):
        print("taken apart")
open_one = Open()
open_one.itself = open_one
atexit.register(print, "at exit")
def wait():
    threading.main_thread().join()
    print("thread")
threading.Thread(target=wait).start()
"""


@STARTS
@pytest.mark.parametrize(
    ("end", "said", "code"), [("", "", 0), ("sys.exit(-3)", "", 253), ("sys.exit('told why')", "told why\n", 1)]
)
def test_at_its_end_threads_are_waited_for_and_all_is_taken_apart(
    popen: type[subprocess.Popen[str]], end: str, said: str, code: int
) -> None:
    command = [sys.executable, "-c", ENDS + end]
    with popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as it:
        assert it.communicate(timeout=60) == ("thread\nat exit\ntaken apart\n", said)
    assert it.returncode == code


@STARTS
def test_output_that_cannot_be_written_is_told_at_its_end(popen: type[subprocess.Popen[str]]) -> None:
    command = [sys.executable, "-c", "import os; os.close(1); print('lost')"]
    with popen(command, env=ENV, stderr=subprocess.PIPE, text=True) as it:
        assert "Bad file descriptor" in it.communicate(timeout=60)[1]
    assert it.returncode == 120
