"""A guard after its command has ended: it lives until the lease is released, because a holder that is dead looks like a loss."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu_worker_pool.host import guard
from tests.processes import has_ended


@contextmanager
def guarding(
    command: list[str], out: int = 1, **options: Any
) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    ours, theirs = socket.socketpair()
    program = [sys.executable, "-I", "-S", str(Path(guard.__file__)), str(theirs.fileno())]
    with subprocess.Popen(program, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL) as process, ours:
        theirs.close()
        start: dict[str, Any] = {"do": "start", "command": command, "env": dict(os.environ), "safe_until": None}
        start |= {"limit": None, "group": 0, "grace_s": 1.0, "limit_grace_s": 0.0, **options}
        socket.send_fds(ours, [guard.frame(start)], [0, out, 2])
        yield process, ours


def said(line: socket.socket, event: str) -> dict[str, Any]:
    buffer = bytearray()
    while True:
        buffer += line.recv(65536)
        for message in guard.unframe(buffer):
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
        limit = guard.boot_time() + 0.1
        line.sendall(guard.frame({"do": "limit", "at": limit, "grace_s": 0.1}))
        ended = said(line, "ended")
        assert guard.boot_time() >= limit
        assert (ended["status"], ended["was_limited"]) == (signal.SIGKILL, True)
    os.close(reading)
    os.close(writing)


def test_a_process_that_has_taken_the_number_of_another_gets_no_signal() -> None:
    with subprocess.Popen(["/bin/sleep", "600"]) as process:
        try:
            assert not guard.send_signals(process.pid, [signal.SIGKILL], lambda: False)
            assert process.poll() is None
            assert guard.send_signals(process.pid, [signal.SIGTERM], lambda: True)
        finally:
            process.wait()
        assert not guard.send_signals(process.pid, [signal.SIGKILL], lambda: True)
