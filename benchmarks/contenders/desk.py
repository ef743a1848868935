"""A socket where a holder in another process reports: a task of Ray or a command of a scheduler that has got its GPU.

The client that asked for the GPU waits at the desk. The holder reports its start time and its pid, and runs until the connection
ends. It needs only the standard library, because each start of a holder is measured.

    python -I -S desk.py PATH      # run such a holder
"""

import json
import os
import socket
import sys
import time


class Desk:
    """The Unix socket of a client, for one holder at a time."""

    def __init__(self, path: str, limit_s: float = 60.0) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen()
        self._listener.settimeout(limit_s)

    @property
    def command(self) -> list[str]:
        """The command of a holder that reports here."""
        return [sys.executable, "-I", "-S", __file__, self.path]

    def wait(self) -> tuple[float, int, socket.socket]:
        """Wait until a holder reports: when it began, its pid, and the connection whose end lets it end."""
        connection, _ = self._listener.accept()
        with connection.makefile("rb") as lines:
            at, pid = json.loads(lines.readline())
        return at, pid, connection


def report_and_hold(path: str) -> None:
    """Report at the desk, and return when the client closes the connection."""
    at = time.monotonic()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        connection.sendall(json.dumps([at, os.getpid()]).encode() + b"\n")
        connection.recv(1)


if __name__ == "__main__":
    report_and_hold(sys.argv[1])
