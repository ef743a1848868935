"""A guard and its supervisor: several commands, lost and stopped guards, and a guard that starts its supervisor."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gpu_worker_pool.failure import CANNOT_RUN, Failure
from gpu_worker_pool.host.guard import boot_time, frame, send_signals, unframe
from gpu_worker_pool.host.guarded import Ended, GuardDied, Guarded, check_can_run, guard_program
from tests.processes import has_ended
from tests.server.running import ROOT

# Writes its number, and stays whatever it is told.
STUBBORN = "trap '' TERM; echo $$; while :; do sleep 0.05; done"
IN_BACKGROUND = f'setsid sh -c "{STUBBORN.replace("$", chr(92) + "$")}" & wait'

# Writes the signals that have come until SIGUSR1.
WAITS_FOR_SIGNALS = """
from signal import SIG_BLOCK, Signals, pthread_sigmask, sigpending, sigwait
numbers = {Signals.SIGTERM, Signals.SIGCONT, Signals.SIGUSR1}
pthread_sigmask(SIG_BLOCK, numbers)
print("ready", flush=True)
seen = set()
while Signals.SIGUSR1 not in seen:
    seen.add(sigwait(numbers))
print(*sorted(Signals(number).name for number in (seen | sigpending()) - {Signals.SIGUSR1}), flush=True)
"""


@pytest.fixture
async def guarded() -> AsyncIterator[Guarded]:
    async with Guarded.start() as one:
        yield one


@contextmanager
def output() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    try:
        yield reading, writing
    finally:
        os.close(reading)
        os.close(writing)


async def start(guarded: Guarded, script: str, out: int = 1) -> None:
    await guarded.run(["sh", "-c", script], dict(os.environ), (0, out, 2), grace_s=0.2)


async def read_line(descriptor: int) -> str:
    return (await asyncio.to_thread(os.read, descriptor, 4096)).decode().strip()


async def test_commands_run_one_after_the_other_and_nothing_of_one_is_left_when_the_next_starts(
    guarded: Guarded,
) -> None:
    with output() as (reading, writing):
        for code in range(3):
            await start(guarded, f"setsid sh -c 'trap \"\" TERM; exec sleep 300' & echo $!; exit {code}", writing)
            left = int(await read_line(reading))
            assert (await guarded.wait()).exit_code == code
            assert has_ended(left, within_s=0)


@pytest.mark.parametrize(("program", "why"), [("/etc", "it is a directory"), ("/etc/passwd", "it is not executable")])
def test_what_cannot_be_run_is_told_before_a_gpu_is_requested(program: str, why: str) -> None:
    with pytest.raises(Failure, match=f"^{program} cannot be run: {why}; ") as refused:
        check_can_run(program, {})
    assert refused.value.code == CANNOT_RUN


async def test_a_command_that_cannot_be_run_leaves_the_guard_to_the_next_one(guarded: Guarded) -> None:
    with pytest.raises(Failure, match="cannot be run: it is not executable") as refused:
        await guarded.run(["/etc/passwd"], {}, grace_s=1.0)
    assert refused.value.code == CANNOT_RUN
    await start(guarded, "exit 3")
    assert await guarded.wait() == Ended(3, was_late=False, was_limited=False, warned_of=None, status=3 << 8)


async def test_a_program_with_many_open_files_can_run_commands() -> None:
    """The number of the line is more than the 1,024 that select() can take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        async with Guarded.start() as guarded:
            await start(guarded, "exit 4")
            assert (await guarded.wait()).exit_code == 4
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_guard_that_was_killed_before_its_command_says_so(guarded: Guarded) -> None:
    os.kill(guarded.pid, signal.SIGKILL)
    assert has_ended(guarded.pid)
    with pytest.raises(GuardDied, match="the guard of the command was killed"):
        await start(guarded, "true")


async def test_a_guard_that_is_killed_takes_all_of_its_command_along_and_nothing_else(guarded: Guarded) -> None:
    other = await asyncio.create_subprocess_exec("sleep", "300")
    async with Guarded.start() as another:
        with output() as (reading, writing):
            await start(guarded, IN_BACKGROUND, writing)
            orphan = int(await read_line(reading))
            await start(another, "sleep 300")
            os.kill(guarded.pid, signal.SIGKILL)
            with pytest.raises(GuardDied):
                await guarded.wait()
            assert has_ended(orphan, within_s=0)
            assert not has_ended(other.pid, within_s=0)
            another.end(0.0)
            assert (await another.wait()).exit_code == 128 + signal.SIGTERM  # and not killed before
    other.kill()
    await other.wait()


async def test_what_a_killed_guard_left_is_looked_for_in_a_thread_of_its_own(guarded: Guarded) -> None:
    """It reads all of /proc, again and again, and the heartbeats of other leases must not wait for that."""
    await start(guarded, "sleep 300")
    os.kill(guarded.pid, signal.SIGKILL)
    with pytest.raises(GuardDied):
        await guarded.wait()
    assert [thread for thread in threading.enumerate() if thread.name.startswith("asyncio_")] != []


async def test_a_stopped_guard_acts_on_all_that_it_was_told_when_it_goes_on(guarded: Guarded) -> None:
    await start(guarded, "sleep 300")
    os.kill(guarded.pid, signal.SIGSTOP)
    for second in range(2000):  # more than the line takes
        guarded.tell_limit(boot_time() + 3600 + second, 1.0)
        guarded.tell_safe_until(boot_time() + 3600 + second)
    guarded.end(0.0)
    os.kill(guarded.pid, signal.SIGCONT)
    assert (await guarded.wait()).exit_code == 128 + signal.SIGTERM


async def test_a_command_that_runs_is_told_to_end_and_not_to_go_on(guarded: Guarded) -> None:
    """SIGCONT would wake another thread, which may take SIGTERM too: a main thread of Python that sleeps misses it then."""
    with output() as (reading, writing):
        await guarded.run([sys.executable, "-c", WAITS_FOR_SIGNALS], dict(os.environ), (0, writing, 2), grace_s=0.2)
        assert await read_line(reading) == "ready"
        guarded.send_signal(signal.SIGTERM)
        guarded.send_signal(signal.SIGUSR1)
        assert await read_line(reading) == "SIGTERM"
        await guarded.wait()


async def test_the_loop_goes_on_while_a_guard_takes_its_time_to_end(guarded: Guarded) -> None:
    await start(guarded, "sleep 300")
    os.kill(guarded.pid, signal.SIGSTOP)
    closing = asyncio.create_task(guarded.close())
    await asyncio.sleep(0)
    assert not closing.done()
    os.kill(guarded.pid, signal.SIGCONT)  # from the loop
    await closing


async def test_signals_that_its_starter_had_blocked_end_neither_the_guard_nor_are_they_blocked_in_its_command() -> None:
    blocked = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        async with Guarded.start() as guarded:
            for number in blocked:
                os.kill(guarded.pid, number)  # it comes before the guard has begun
            with output() as (reading, writing):
                await start(guarded, "grep -E 'Sig(Blk|Ign)' /proc/self/status", writing)
                assert (await guarded.wait()).exit_code == 0
                found = (await read_line(reading)).split()
                ours = sum(
                    1 << (number - 1) for number in blocked
                )  # other signals may have been ignored before this test
                assert [int(found[1], 16), int(found[3], 16) & ours] == [0, 0]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def test_what_was_ignored_before_the_guard_is_ignored_by_its_command() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        async with Guarded.start() as guarded:
            await start(guarded, "kill -HUP $$; exit 5")
            assert (await guarded.wait()).exit_code == 5
    finally:
        signal.signal(signal.SIGHUP, before)


# --- a guard that starts its supervisor --------------------------------------------------------------------------------

# Runs one command, which it gets as its argument, and writes what became of it.
SUPERVISOR = """
import asyncio, os, sys
from gpu_worker_pool.host.guarded import GuardDied, Guarded
async def main():
    async with Guarded.inherited() as guarded:
        assert guarded.pid == os.getppid()
        print("supervisor", os.getpid(), flush=True)
        try:
            await guarded.run(["sh", "-c", sys.argv[1]], os.environ, grace_s=0.2)
            print("ended", (await guarded.wait()).exit_code, flush=True)
        except GuardDied as died:
            print("died", flush=True)
asyncio.run(main())
"""


@contextmanager
def supervising(script: str) -> Iterator[subprocess.Popen[str]]:
    program = [*guard_program(), "--supervise", sys.executable, "-c", SUPERVISOR, script]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(program, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    with process:
        yield process


def lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(count)]


def test_a_guard_can_start_its_supervisor_which_is_not_part_of_the_command() -> None:
    with supervising("setsid sleep 300 & echo $!; exit 7") as guard:
        _, left, ended = lines(guard, 3)
        assert ended == "ended 7"
        assert has_ended(int(left), within_s=0)
        assert guard.wait() == 0


def test_a_supervisor_that_is_killed_takes_the_command_along_and_the_guard_stays_until_it_is_gone() -> None:
    with supervising(STUBBORN) as guard:
        supervisor, command = lines(guard, 2)
        os.kill(int(supervisor.split()[1]), signal.SIGKILL)
        guard.wait()
        assert has_ended(int(command), within_s=0)


def test_of_a_guard_that_is_killed_the_supervisor_ends_what_is_left_and_knows_it() -> None:
    with supervising(IN_BACKGROUND) as guard:
        _, orphan = lines(guard, 2)
        guard.kill()
        assert lines(guard, 1) == ["died"]
        assert has_ended(int(orphan), within_s=0)


def test_a_signal_to_the_guard_reaches_its_supervisor() -> None:
    with supervising("sleep 300") as guard:
        (supervisor,) = lines(guard, 1)
        pid = int(supervisor.split()[1])
        guard.terminate()
        guard.wait()
        assert has_ended(pid)


# --- a guard, told by hand ------------------------------------------------------------------------------------------------


@contextmanager
def guarding(
    command: list[str], out: int = 1, **options: Any
) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    ours, theirs = socket.socketpair()
    program = [*guard_program(), str(theirs.fileno())]
    with subprocess.Popen(program, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL) as process, ours:
        theirs.close()
        start: dict[str, Any] = {"do": "start", "command": command, "env": dict(os.environ), "safe_until": None}
        start |= {"limit": None, "group": 0, "grace_s": 1.0, "limit_grace_s": 0.0, **options}
        socket.send_fds(ours, [frame(start)], [0, out, 2])
        yield process, ours


def said(line: socket.socket, event: str) -> dict[str, Any]:
    buffer = bytearray()
    while True:
        buffer += line.recv(65536)
        for message in unframe(buffer):
            if message["event"] == event:
                return message


def test_a_guard_lives_until_its_line_is_closed() -> None:
    with guarding(["true"]) as (process, line):
        assert said(line, "ended")["status"] == 0
        # For a while: a guard that does not wait ends within milliseconds.
        assert not has_ended(process.pid, within_s=0.5)
        line.close()
        assert has_ended(process.pid)


def test_a_command_that_ignores_sigterm_is_killed_at_its_limit_and_not_a_grace_after_it() -> None:
    reading, writing = os.pipe()
    script = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done"]
    with guarding(script, grace_s=3600.0, out=writing) as (_, line):
        assert os.read(reading, 6) == b"ready\n"
        limit = boot_time() + 0.1
        line.sendall(frame({"do": "limit", "at": limit, "grace_s": 0.1}))
        ended = said(line, "ended")
        assert boot_time() >= limit
        assert (ended["status"], ended["was_limited"]) == (signal.SIGKILL, True)
    os.close(reading)
    os.close(writing)


def test_a_process_that_has_taken_the_number_of_another_gets_no_signal() -> None:
    with subprocess.Popen(["/bin/sleep", "600"]) as process:
        try:
            assert not send_signals(process.pid, [signal.SIGKILL], lambda: False)
            assert process.poll() is None
            assert send_signals(process.pid, [signal.SIGTERM], lambda: True)
        finally:
            process.wait()
        assert not send_signals(process.pid, [signal.SIGKILL], lambda: True)
