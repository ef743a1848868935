"""A socket where a holder in another process reports: a task of Ray or a command of a scheduler that has got its GPU.

The client that asked for the GPU waits at the desk. The holder reports its GPU, its start time and its pid, and runs
until the connection ends. It needs only the standard library, because each start of a holder is measured.

    python -I -S desk.py PATH [VARIABLE]      # run such a holder, on the GPUs of CUDA_VISIBLE_DEVICES or VARIABLE
"""

import json
import os
import socket
import sys
import time


class Desk:
    """The Unix socket of a client, for one holder at a time."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen()
        self._listener.settimeout(timeout_s)

    def wait(self) -> "Visitor":
        """Wait until a holder reports."""
        connection, _ = self._listener.accept()
        with connection.makefile("rb") as lines:
            told = json.loads(lines.readline())
        return Visitor(connection, told["at"], told["gpus"], told["pid"])


class Visitor:
    """A holder that runs, until it is told to end."""

    def __init__(self, connection: socket.socket, at: float, gpus: list[int], pid: int) -> None:
        self._connection = connection
        self.at = at
        self.gpus = gpus
        self.pid = pid

    def end(self) -> None:
        """Tell it to end. It ends by itself when the connection closes."""
        self._connection.close()


def report_and_hold(path: str, gpus: list[int]) -> None:
    """Report at the desk, and return when the client closes the connection."""
    at = time.monotonic()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        connection.sendall(json.dumps({"at": at, "gpus": gpus, "pid": os.getpid()}).encode() + b"\n")
        connection.recv(1)


if __name__ == "__main__":
    variable = sys.argv[2] if len(sys.argv) > 2 else "CUDA_VISIBLE_DEVICES"
    report_and_hold(sys.argv[1], [int(gpu) for gpu in os.environ[variable].split(",")])
