"""A fork of the loaded process is as a process of its own to the test that starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.preloaded import PreloadedPopen, stand_in
from tests.processes import has_ended

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


# --- behind a stand-in -----------------------------------------------------------------------------------------------

IN_SHELL = """
import os, signal, sys
print(__name__, sys.argv, os.getcwd(), os.environ["SEEN"], os.getpgid(0), oct(os.umask(0)), flush=True)
print(signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN, "aiohttp" in sys.modules, flush=True)
os.write(5, sys.stdin.readline().encode())
sys.exit(7)
"""


def in_shell(script: str, folder: Path, program: str, command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    shell = ["bash", "-c", script, "bash", *command, "-c", program, "one"]
    return subprocess.run(
        shell, env=ENV, cwd=folder, input="told\n", capture_output=True, text=True, timeout=60, check=False
    )


def test_behind_a_stand_in_a_program_of_a_shell_has_what_the_shell_gave_it(tmp_path: Path) -> None:
    script = "trap '' USR1; umask 027; exec 5>five; \"$@\"; echo $?"
    done = in_shell(script, tmp_path, IN_SHELL, stand_in())
    head = f"__main__ ['-c', 'one'] {tmp_path} yes {os.getpgid(0)} 0o27\nTrue True\n7\n"
    assert (done.stdout, done.stderr, done.returncode) == (head, "", 0)
    assert (tmp_path / "five").read_text(encoding="ascii") == "told\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_is_ended_with_its_stand_in(tmp_path: Path, number: signal.Signals) -> None:
    program = "import os; print(os.getpid(), flush=True); input()"
    pipe = subprocess.PIPE
    command = [*stand_in(), "-c", program]
    with subprocess.Popen(command, env=ENV, cwd=tmp_path, stdin=pipe, stdout=pipe, text=True) as it:
        assert it.stdout is not None
        pid = int(it.stdout.readline())
        it.send_signal(number)
        assert has_ended(pid)
    assert (it.returncode, pid != it.pid) == (-number, True)


def test_a_stand_in_for_what_no_fork_can_be_becomes_it(tmp_path: Path) -> None:
    show = "import os, sys; print(os.getppid(), 'aiohttp' in sys.modules, flush=True)"
    *python, address = stand_in()
    unloaded = f"{os.getpid()} False\n"
    for address_, env in ((address, {**ENV, "PYTHONOPTIMIZE": "1"}), ("nobody listens here", ENV)):
        done = subprocess.run(
            [*python, address_, "-c", show],
            env=env,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.stdout, done.returncode) == (unloaded, 0)
