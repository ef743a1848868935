"""A command in a real terminal (a pty), and what a person would see there."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pyte

SOON_S = 30.0


class Terminal:
    """Started when entered, ended by its pid when left. `text` is what the screen shows; what has scrolled away or was
    overwritten is not on it, but it is in `all_output`.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        columns: int = 120,
        rows: int = 40,
        cwd: Path | None = None,
    ) -> None:
        self._command = list(command)
        self._env = {**env, "TERM": "xterm-256color"}
        self._cwd = cwd
        self._columns, self._rows = columns, rows
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._status: int | None = None
        self._descriptor = -1
        self.pid = -1
        self.all_output = b""

    def __enter__(self) -> Self:
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            try:
                size = struct.pack("HHHH", self._rows, self._columns, 0, 0)
                fcntl.ioctl(0, termios.TIOCSWINSZ, size)
                if self._cwd is not None:
                    os.chdir(self._cwd)
                os.execvpe(self._command[0], self._command, self._env)  # noqa: S606 - our own command
            finally:
                os._exit(127)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            self._status = os.waitpid(self.pid, 0)[1]
        self.hang_up()

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip()

    def type(self, text: str) -> None:
        """As from the keyboard: "\\x03" is Ctrl-C."""
        os.write(self._descriptor, text.encode())

    def hang_up(self) -> None:
        """As if the window was closed, or the connection of ssh lost."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def wait_for(self, text: str) -> str:
        """Read until the screen shows this; the screen then."""
        until = time.monotonic() + SOON_S
        while text not in self.text:
            assert self._read(until), f"{text!r} never came:\n{self.text}"
        return self.text

    def wait(self) -> int:
        """Read to its end; its exit code, negative for a signal."""
        until = time.monotonic() + SOON_S
        while self._read(until):
            pass
        if self._status is None:
            assert time.monotonic() < until, f"it does not end:\n{self.text}"
            self._status = os.waitpid(self.pid, 0)[1]
        return os.waitstatus_to_exitcode(self._status)

    def _read(self, until: float) -> bool:
        """Take in what it has written; False where it has ended or the time is over."""
        ready, _, _ = select.select([self._descriptor], [], [], max(until - time.monotonic(), 0))
        if not ready:
            return False
        try:
            data = os.read(self._descriptor, 65536)
        except OSError:  # what Linux says when nobody has the other end any more
            return False
        self.all_output += data
        self._stream.feed(data)
        return bool(data)
