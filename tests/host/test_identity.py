"""Which askers are processes of this machine, with real processes."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.core.model.request import Holder
from gpu_worker_pool.host.processes import ForeignProcess, Machine, NoSuchProcess, ProcessTable, _host_names

ROOT = Path(__file__).parent.parent.parent
GENEROUS_S = 60
US = os.getuid()
CAT = shutil.which("cat") or "/bin/cat"
UNSHARE = shutil.which("unshare")

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc here")

# Its first thread returns, and the second one goes on until its input is closed.
FIRST_THREAD_RETURNS = """
import ctypes, os, platform, sys, threading
def second():
    while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z":
        os.sched_yield()
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)
threading.Thread(target=second).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Starts processes that end by themselves when their input is closed; what is left is killed afterwards."""
    started: list[subprocess.Popen[str]] = []

    def start(*command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command or (CAT,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=GENEROUS_S)


@pytest.fixture
def here() -> Machine:
    return Machine.here()


def start_of(pid: int) -> float:
    started = ProcessTable().started(pid)
    assert started is not None
    return started


def until_it_is_dead(process: subprocess.Popen[str]) -> None:
    """Waits for the end of a child and leaves it a zombie."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def who(machine: Machine, pid: int | None, **changes: Any) -> Holder:
    """A holder that says everything about itself."""
    holder = Holder(
        host=socket.gethostname(),
        pid=pid,
        pid_started=None if pid is None else start_of(pid),
        boot_id=machine.boot_id,
        pid_namespace=machine.pid_namespace,
    )
    return dataclasses.replace(holder, **changes)


class TestWhoIsLocal:
    def test_the_same_boot_and_namespace_are_enough_for_a_caller_of_this_machine(self, here: Machine) -> None:
        me = os.getpid()
        holder = who(here, me, host="elsewhere.example.org")

        assert here.local_process(holder, uid=US) == ProcessId(me, start_of(me))

    def test_a_caller_from_elsewhere_has_no_process_here_whatever_it_says(self, here: Machine) -> None:
        for pid in (os.getpid(), 1, 2**22 + 1):
            holder = dataclasses.replace(who(here, os.getpid()), pid=pid, pid_started=None)
            assert here.local_process(holder, uid=None) is None
            assert here.local_process(holder, uid=None, may_name_any=True) is None

    def test_a_process_of_another_user_is_for_administrators_to_name(self, here: Machine) -> None:
        holder = who(here, os.getpid())

        with pytest.raises(ForeignProcess, match=f"pid {os.getpid()} is a process of") as raised:
            here.local_process(holder, uid=US + 1)
        assert raised.value.process.pid == os.getpid()
        assert here.local_process(holder, uid=US + 1, may_name_any=True) is not None

    def test_a_process_that_is_watched_is_not_looked_up(self, here: Machine) -> None:
        holder = who(here, os.getpid(), pid_started=5)
        asked: list[ProcessId] = []

        def is_watched(process: ProcessId) -> bool:
            asked.append(process)
            return process.started == 5.0

        assert here.local_process(holder, uid=US, is_watched=is_watched) == ProcessId(os.getpid(), 5.0)
        with pytest.raises(NoSuchProcess):
            here.local_process(who(here, os.getpid(), pid_started=6), uid=US, is_watched=is_watched)
        # Without a start time it might be a later process with the same pid.
        here.local_process(who(here, os.getpid(), pid_started=None), uid=US, is_watched=is_watched)
        assert [process.started for process in asked] == [5.0, 6.0]

    @pytest.mark.parametrize("said", ["boot_id", "pid_namespace"])
    def test_another_boot_or_namespace_is_elsewhere_whatever_else_is_said(self, here: Machine, said: str) -> None:
        lying = who(here, os.getpid(), **{said: "another"})
        alone = who(here, os.getpid(), **{"boot_id": None, "pid_namespace": None, said: "another"})

        assert here.local_process(lying, uid=US) is None
        assert here.local_process(alone, uid=US) is None

    @pytest.mark.parametrize("spelling", [str, str.upper, lambda name: name.partition(".")[0], "{}.".format])
    def test_a_host_of_ours_counts(self, here: Machine, spelling: Callable[[str], str]) -> None:
        holder = Holder(host=spelling(socket.gethostname()), pid=os.getpid())

        assert here.local_process(holder, uid=US) == ProcessId(os.getpid(), start_of(os.getpid()))


def test_a_process_that_does_not_run_or_is_another_one_is_refused_with_what_to_do(here: Machine, spawn: Spawn) -> None:
    gone, zombie, later = spawn(), spawn(), spawn()
    holders = [who(here, gone.pid), who(here, zombie.pid), who(here, later.pid, pid_started=start_of(later.pid) - 1)]
    gone.communicate(timeout=GENEROUS_S)
    zombie.kill()
    until_it_is_dead(zombie)

    for holder in (*holders, dataclasses.replace(holders[0], pid_started=None)):
        with pytest.raises(NoSuchProcess) as raised:
            here.local_process(holder, uid=US)
        message = f"pid {holder.pid} is not running on this machine; send the pid of a running process, or none"
        assert (raised.value.pid, str(raised.value)) == (holder.pid, message)


class TestIsAlive:
    def test_a_running_process_is_until_it_is_killed_reaped_or_not(self, here: Machine, spawn: Spawn) -> None:
        process = spawn()
        id_ = ProcessId(process.pid, start_of(process.pid))
        assert here.is_alive(id_)
        assert here.is_alive(ProcessId(process.pid))

        process.kill()
        until_it_is_dead(process)
        assert not here.is_alive(id_)

        process.communicate(timeout=GENEROUS_S)
        assert not here.is_alive(id_)

    def test_a_process_whose_first_thread_returned_is_alive(self, here: Machine, spawn: Spawn) -> None:
        process = spawn(sys.executable, "-c", FIRST_THREAD_RETURNS)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

        assert here.is_alive(ProcessId(process.pid, start_of(process.pid)))

        process.communicate(timeout=GENEROUS_S)
        assert not here.is_alive(ProcessId(process.pid))

    @pytest.mark.parametrize("shown", ["nothing", "gibberish", "no /proc"])
    def test_what_proc_does_not_show_is_dead_only_if_there_is_no_such_pid(
        self, here: Machine, spawn: Spawn, tmp_path: Path, shown: str
    ) -> None:
        process = spawn()
        if shown == "gibberish":
            (tmp_path / str(process.pid)).mkdir()
            (tmp_path / str(process.pid) / "stat").write_text("gibberish")
        blind = dataclasses.replace(here, proc=None if shown == "no /proc" else tmp_path)
        id_ = ProcessId(process.pid, 1.0)

        assert blind.is_alive(id_)
        holder = who(here, process.pid, pid_started=1.0)
        assert blind.local_process(holder, uid=US, may_name_any=True) == id_
        assert blind.local_process(holder, uid=US) is None, "its user is hidden"

        process.communicate(timeout=GENEROUS_S)
        assert not blind.is_alive(id_) or shown == "gibberish"

    @pytest.mark.skipif(os.geteuid() != 0 or UNSHARE is None, reason="needs root and unshare to hide processes")
    def test_a_process_hidden_by_hidepid_is_alive(self) -> None:
        program = """
import os
from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.host.processes import Machine
here = Machine.here()
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print(os.path.exists("/proc/1"), here.is_alive(ProcessId(1, 1.0)), here.is_alive(ProcessId(2**22 - 1)))
"""
        # No exec, so that the shell stays as pid 1: somebody else's process.
        mount = 'mount -t proc -o hidepid=invisible proc /proc 2>/dev/null || exit 77; "$@"; exit'
        answer = subprocess.run(
            [UNSHARE or "", "-m", "-p", "-f", "/bin/sh", "-c", mount, "sh", sys.executable, "-c", program],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=GENEROUS_S,
        )
        if answer.returncode == 77 or "unshare" in answer.stderr:
            pytest.skip(f"processes cannot be hidden here: {answer.stderr.strip()}")

        assert answer.stdout.split() == ["False", "True", "False"], answer.stderr


class TestHere:
    def test_the_long_name_comes_from_the_hosts_file_and_localhost_is_nobodys(self, tmp_path: Path) -> None:
        hosts = tmp_path / "hosts"
        hosts.write_text(
            "127.0.0.1 localhost localhost.localdomain\n"
            "127.0.1.1 Box.Lab.org box  # box2\n"
            "::1 localhost6 box\n"
            "10.0.0.2 other.lab.org other\n"
        )

        assert _host_names("box", hosts) == {"box", "box.lab.org"}
        assert _host_names("BOX.lab.org", hosts) == {"box", "box.lab.org"}
        assert _host_names("new.lab.org", tmp_path / "none") == {"new", "new.lab.org"}

    @pytest.mark.parametrize("has_own_proc", [False, True])
    def test_a_process_in_another_pid_namespace_is_elsewhere(self, here: Machine, has_own_proc: bool) -> None:
        program = """
import json, os
from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.core.model.request import Holder
from gpu_worker_pool.host.processes import Machine
here, pid = Machine.here(), os.getpid()
holder = Holder(pid=pid, boot_id=here.boot_id, pid_namespace=here.pid_namespace)
print(json.dumps([pid, here.boot_id, here.pid_namespace, here.proc is not None,
    here.local_process(holder, uid=os.getuid(), may_name_any=True), here.is_alive(ProcessId(pid)), here.is_alive(ProcessId(pid + 500))]))
"""
        if UNSHARE is None:
            pytest.skip("there is no unshare here")
        answer = subprocess.run(
            [UNSHARE, "-p", "-f", *(["--mount-proc"] if has_own_proc else []), sys.executable, "-c", program],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=GENEROUS_S,
        )
        if answer.stderr.startswith("unshare"):
            pytest.skip(f"no pid namespace can be had here: {answer.stderr.strip()}")
        pid, their_boot, their_namespace, sees_proc, itself, is_alive, is_other_alive = json.loads(answer.stdout)

        # pid 1 runs on the outside, too: it must not be taken for it.
        assert pid == 1
        assert their_boot == here.boot_id
        holder = Holder(host=socket.gethostname(), pid=pid, boot_id=their_boot, pid_namespace=their_namespace)
        assert here.local_process(holder, uid=US) is None
        # Within, a /proc that shows the outside is not believed.
        assert sees_proc is has_own_proc
        assert itself[0] == 1
        assert (itself[1] is not None) is has_own_proc
        assert (is_alive, is_other_alive) == (True, False)
