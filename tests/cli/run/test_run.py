"""`gpu-pool run`, in real processes: what it sets, waits for, passes on and ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.cli.own_process import GPU_POOL, ON_ANOTHER_MACHINE, environment, gpu_pool, start_gpu_pool
from tests.cli.terminal import Terminal
from tests.processes import has_ended
from tests.server import elsewhere
from tests.server.leasing import eventually, get, queue, take, wait_until_free

# Says that it runs, on standard output; then stays, whatever it is told.
STUBBORN = 'trap "" TERM INT HUP; echo $$; while :; do sleep 0.1; done'


def state_of(pid: int) -> str | None:
    """As the kernel has it: S sleeps, T is stopped, Z is dead; None where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_alive(pid: int) -> bool:
    return state_of(pid) not in {None, "Z"}


def the_lease(server: ServerProcess) -> dict[str, object]:
    """The only active one there is, once there is one."""

    def active() -> dict[str, object] | None:
        return next((lease for lease in server.json("/leases")["leases"] if lease["state"] == "active"), None)

    return eventually(active, "a lease")


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> int:
    code = process.wait(timeout=30)
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()
    return code


# --- what the command is given, and what it gives back -------------------------------------------------------------


def test_the_command_sees_its_gpu_and_no_other_and_ends_as_it_ends(server: ServerProcess) -> None:
    script = 'echo "$CUDA_DEVICE_ORDER $CUDA_VISIBLE_DEVICES $GPU_POOL_LEASE_GPUS $GPU_POOL_LEASE_ID"; exit 7'
    done = gpu_pool("run", "--", "sh", "-c", script, server=server)
    order, visible, gpus, lease_id = done.out.split()
    assert (done.code, order) == (7, "PCI_BUS_ID")
    assert visible == gpus
    assert visible in {"0", "1"}
    ended = server.json(f"/leases/{lease_id}")
    assert ended["end_reason"] == "released"
    assert ended["labels"] == {"command": "sh"}  # never its options, which may have secrets in them


def test_options_after_the_command_are_its_own_and_its_input_reaches_it(server: ServerProcess) -> None:
    done = gpu_pool("run", "--gpus", "2", "cat", "-A", "--", "-", server=server, text="a word\n")
    assert (done.code, done.out) == (0, "a word$\n")


@pytest.mark.parametrize(("command", "code"), [("no-such-program", 127), ("/etc/passwd", 126)])
def test_what_cannot_be_run_says_so_as_timeout_does(server: ServerProcess, command: str, code: int) -> None:
    done = gpu_pool("run", "--", command, server=server)
    assert done.code == code
    assert command in done.err
    assert not [lease for lease in server.json("/leases")["leases"] if lease["state"] == "active"]


def test_only_gpus_that_the_caller_could_see_are_asked_for(server: ServerProcess) -> None:
    other = take(server, among=["1"])
    seen = gpu_pool(
        "run", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES", server=server, env={"CUDA_VISIBLE_DEVICES": "0,7"}
    )
    assert seen.out == "0\n"
    waited = gpu_pool("run", "--timeout", "0.5", "--", "true", server=server, env={"CUDA_VISIBLE_DEVICES": "1"})
    assert waited.code == 124  # GPU 0 is free, and not wanted
    hidden = gpu_pool("run", "--", "true", server=server, env={"CUDA_VISIBLE_DEVICES": ""})
    assert hidden.code == 125
    assert "CUDA_VISIBLE_DEVICES" in hidden.err
    assert server.json(f"/leases/{other['id']}")["state"] == "active"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("--gpus", "3", "--", "true"), "3 GPUs on one node were asked for; this box has 2 GPUs"),
        (("--gpus", "0", "--", "true"), "--gpus"),
        (("--memory", "12 apples", "--", "true"), "write 12GB"),
        (("--timeout", "soon", "--", "true"), "write 90s"),
        (("--time", "0", "--", "true"), "--time: '0' is too short"),
        (("--time", "400d", "--", "true"), "time"),
        (("--endpoint", "localhost:99999", "--", "true"), "99999"),
        (("--endpoint", "http://127.0.0.1:9", "--", "true"), "gpu-pool serve"),
        ((), "CMD"),
    ],
)
def test_bad_input_is_our_failure_and_not_the_commands(
    server: ServerProcess, arguments: tuple[str, ...], hint: str
) -> None:
    done = gpu_pool("run", *arguments, server=server)
    assert done.code == 125
    assert hint in done.err
    assert "Traceback" not in done.err


def test_gpus_of_another_machine_are_not_taken_for_ours(server: ServerProcess) -> None:
    """A server that says that it runs elsewhere, as one behind a tunnel does."""
    with ServerProcess({"SIMULATED_GPUS": "1"}, command=ON_ANOTHER_MACHINE) as elsewhere:
        refused = gpu_pool("run", "--", "true", server=elsewhere)
        assert refused.code == 125
        assert "--remote" in refused.err
        both = f"{elsewhere.url},{server.url}"
        here = gpu_pool("run", "-e", both, "--", "sh", "-c", "echo $GPU_POOL_LEASE_ENDPOINT")
        assert here.out.startswith("127.0.0.1")
        assert "left out" in here.err
        there = gpu_pool("run", "--remote", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES", server=elsewhere)
        assert (there.code, there.out) == (0, "0\n")


# --- waiting -------------------------------------------------------------------------------------------------------


def test_a_wait_is_explained_in_a_terminal_and_ctrl_c_leaves_the_queue_at_once(server: ServerProcess) -> None:
    for owner in ("ada", "bob"):
        take(server, owner=owner)
    with Terminal([*GPU_POOL, "run", "--", "true"], environment(server)) as terminal:
        shown = terminal.wait_for(" since ")
        assert "for 1 GPU (1st of 1)" in shown
        said = " ".join(shown.split())
        assert re.search(r"(ada|bob) 1 since [0-9:]+, (ada|bob) 1 since", said)
        assert (said.count("ada"), said.count("bob")) == (1, 1)
        assert server.json("/pool")["queue_length"] == 1
        terminal.type("\x03")
        assert terminal.wait() == 130
        assert "waiting" not in terminal.text  # the line is taken away
    assert server.json("/pool")["queue_length"] == 0


def test_a_wait_ends_with_the_grant_and_with_the_timeout(server: ServerProcess) -> None:
    held = take(server, gpus=2)
    late = gpu_pool("run", "--timeout", "3", "--", "true", server=server)
    assert late.code == 124
    assert "Position 1 of 1" in late.err
    waiting = start_gpu_pool("run", "--", "sh", "-c", "echo ran", server=server)
    eventually(lambda: server.json("/pool")["queue_length"] == 1, "it waits")
    server.ask(f"/leases/{held['id']}", "DELETE")
    assert read_line(waiting) == "ran"
    assert end(waiting) == 0


def test_the_last_signal_that_ends_a_wait_counts(server: ServerProcess) -> None:
    take(server, gpus=2)
    waiting = start_gpu_pool("run", "--", "true", server=server)
    eventually(lambda: server.json("/pool")["queue_length"] == 1, "it waits")
    for number in (signal.SIGSTOP, signal.SIGHUP, signal.SIGTERM, signal.SIGCONT):
        waiting.send_signal(number)
    assert end(waiting) == 128 + signal.SIGTERM


def test_where_its_output_cannot_be_written_the_exit_code_is_that_of_the_command(server: ServerProcess) -> None:
    """Its standard output is the command's, and it writes nothing there itself."""
    with open("/dev/full", "wb") as full:  # noqa: PTH123 - a device
        for code in (0, 3):
            command = [*GPU_POOL, "run", "--", "sh", "-c", f"exit {code}"]
            done = subprocess.run(
                command, env=environment(server, {}), stdout=full, stderr=subprocess.PIPE, check=False
            )
            assert done.returncode == code, done


@pytest.mark.parametrize("options", ["", "--json"])
def test_messages_that_cannot_be_written_do_not_change_how_it_ends(server: ServerProcess, options: str) -> None:
    script = f"{' '.join(GPU_POOL)} run {options} -- sh -c 'exit 3' >/dev/full 2>&1"
    assert subprocess.run(["/bin/sh", "-c", script], env=environment(server), check=False).returncode == 3


# --- signals, and deaths -------------------------------------------------------------------------------------------


def test_a_signal_is_passed_on_to_all_of_the_command(server: ServerProcess) -> None:
    script = 'trap "echo got usr1" USR1; sh -c \'trap "" USR1; echo $$; exec sleep 60\' & echo ready; wait; wait'
    process = start_gpu_pool("run", "--", "sh", "-c", script, server=server)
    said = {read_line(process), read_line(process)}
    assert "ready" in said
    process.send_signal(signal.SIGUSR1)
    assert read_line(process) == "got usr1"
    process.send_signal(signal.SIGTERM)
    assert end(process) == 128 + signal.SIGTERM
    assert not is_alive(int(next(iter(said - {"ready"}))))
    wait_until_free(server)


def test_where_gpu_pool_itself_is_stopped_the_guard_ends_the_command_before_a_remote_lease_is_over() -> None:
    with ServerProcess({"SIMULATED_GPUS": "2"}, command=elsewhere.COMMAND) as server:
        env = {"GPU_POOL_TTL": "3"}
        process = start_gpu_pool("run", "--json", "--gpus", "2", "--", "sh", "-c", STUBBORN, server=server, env=env)
        command = int(read_line(process))
        waiter = queue(server)
        process.send_signal(signal.SIGSTOP)
        granted = get(server, waiter["id"], wait_s=30)
        assert granted["state"] == "active"
        assert not is_alive(command)
        process.send_signal(signal.SIGCONT)
        assert process.stderr is not None
        events = [json.loads(line) for line in process.stderr]
        assert [event["event"] for event in events] == ["granted", "lost", "ended"]
        assert end(process) == 125


# Goes on under another number all the time, in a session of its own, and does not mind being asked to end.
HOPPER = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
until = time.monotonic() + 20
if os.fork():
    os._exit(0)
while time.monotonic() < until:
    if os.fork():
        os._exit(0)
    os.setsid()
    time.sleep(0.003)
"""
# Its first thread ends, so that it is dead by its state, and another one works on.
ZOMBIE = """
import ctypes, os, threading, time
ready, say = os.pipe()
if os.fork():
    os.close(say)
    os.read(ready, 1)  # ends with the other one's first thread
    os._exit(0)
os.setsid()
threading.Thread(target=time.sleep, args=(20,)).start()
os.write(say, b"x")
ctypes.CDLL(None).syscall(60, 0)
"""


@pytest.mark.parametrize("program", [HOPPER, ZOMBIE], ids=["hopper", "zombie"])
def test_what_hides_is_found(server: ServerProcess, program: str) -> None:
    command = [sys.executable, "-c", program]
    process = start_gpu_pool("run", "--grace", "0.1s", "--", *command, server=server)
    assert process.wait(timeout=30) == 0
    # Whatever lives on has our end of its output open.
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    assert os.read(process.stdout.fileno(), 1) == b""  # and not BlockingIOError
    end(process)


def test_killed_with_9_its_gpu_is_not_granted_before_the_command_is_gone(server: ServerProcess) -> None:
    process = start_gpu_pool("run", "--gpus", "2", "--grace", "1s", "--", "sh", "-c", STUBBORN, server=server)
    command = int(read_line(process))
    waiter = queue(server)
    process.kill()
    end(process)
    # It does not go on SIGTERM, so there is time to look: the waiter waits while it lives.
    assert is_alive(command)
    assert server.json(f"/leases/{waiter['id']}")["state"] == "queued"
    granted = get(server, waiter["id"], wait_s=30)
    assert granted["state"] == "active"
    assert not is_alive(command)


def test_with_its_guard_killed_the_command_dies_with_all_it_started(server: ServerProcess) -> None:
    script = "setsid sh -c 'trap \"\" TERM; echo $$; while :; do sleep 0.1; done' & wait"
    process = start_gpu_pool("run", "--", "sh", "-c", script, server=server)
    grandchild = int(read_line(process))
    guard = the_lease(server)["pid"]
    assert isinstance(guard, int)
    assert guard != process.pid
    os.kill(guard, signal.SIGKILL)
    assert end(process) == 125
    assert not is_alive(grandchild)
    wait_until_free(server)


def test_with_both_killed_at_once_the_kernel_ends_the_command(server: ServerProcess) -> None:
    process = start_gpu_pool("run", "--", "sh", "-c", STUBBORN, server=server)
    command = int(read_line(process))
    guard = the_lease(server)["pid"]
    assert isinstance(guard, int)
    process.kill()
    os.kill(guard, signal.SIGKILL)
    end(process)
    eventually(lambda: not is_alive(command), "the command is dead")
    wait_until_free(server)


def test_when_the_lease_is_lost_the_command_is_stopped_with_all_it_started(server: ServerProcess) -> None:
    script = "setsid sh -c 'trap \"\" TERM; echo $$; while :; do sleep 0.1; done' & wait"
    env = {"GPU_POOL_TTL": "3"}
    process = start_gpu_pool("run", "--grace", "0.3s", "--", "sh", "-c", script, server=server, env=env)
    grandchild = int(read_line(process))
    lease = the_lease(server)
    server.ask(f"/admin/leases/{lease['id']}/revoke", "POST")
    assert process.stderr is not None
    assert "GPU" in process.stderr.readline()  # the grant
    assert "no longer yours" in process.stderr.readline()
    assert end(process) == 125
    assert not is_alive(grandchild)


def test_in_a_terminal_ctrl_c_reaches_the_command_once_and_its_code_is_ours(server: ServerProcess) -> None:
    script = "trap 'echo caught; exit 3' INT; echo ready; while :; do sleep 0.05; done"
    with Terminal([*GPU_POOL, "run", "--", "sh", "-c", script], environment(server)) as terminal:
        terminal.wait_for("ready")
        terminal.type("\x03")
        assert terminal.wait() == 3
        assert terminal.all_output.count(b"caught") == 1


def test_a_terminal_that_is_closed_ends_the_command_also_where_run_leads_the_session(server: ServerProcess) -> None:
    """As with `ssh -t box gpu-pool run ...` and `tmux new 'gpu-pool run ...'`: the kernel tells the leader only."""
    script = "echo pid $$ runs; exec sleep 300"
    with Terminal([*GPU_POOL, "run", "--", "sh", "-c", script], environment(server)) as terminal:
        found = re.search(r"pid (\d+) runs", terminal.wait_for(" runs"))
        assert found is not None
        terminal.hang_up()
        assert has_ended(int(found[1]))
        assert has_ended(terminal.pid)
    wait_until_free(server)


def test_in_a_shell_with_job_control_it_is_one_job(server: ServerProcess) -> None:
    env = {**environment(server), "PS1": "$ ", "HISTFILE": os.devnull}
    with Terminal(["bash", "--norc", "--noprofile", "-i"], env) as shell:
        run = " ".join(GPU_POOL)
        shell.type(f"{run} run -q -- sh -c 'read line; echo got $line' &\n")
        # It wants to read in the background, so it is stopped, and the shell knows.
        shell.type("until jobs | grep -q Stopped; do sleep 0.05; done; echo stopped: $((20 + 3))\n")
        shell.wait_for("stopped: 23")
        shell.type("fg\n")
        shell.type("a word\n")
        shell.wait_for("got a word")
        shell.type("exit\n")
        shell.wait()


def test_closed_streams_are_nothing_and_not_sockets_of_ours(server: ServerProcess) -> None:
    # Through a shell, which closes them.
    script = f"{' '.join(GPU_POOL)} run -- sh -c 'readlink /proc/self/fd/0; readlink /proc/self/fd/2 >&1' <&- 2>&-"
    done = subprocess.run(
        ["/bin/sh", "-c", script], env=environment(server), capture_output=True, text=True, check=False
    )
    assert done.stdout == "/dev/null\n/dev/null\n"
    assert done.returncode == 0
