"""What readers that do not read cost the server: its memory with so many of them, beside its memory without any.

Each reader asks for `/pool` of a large pool and takes nothing of the answer. Its socket has a small buffer, so that the
answer stays with the server. The other server has the same pool and none of these readers.
"""

from __future__ import annotations

import http.client
import json
import socket
import statistics
import tempfile
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shared.processes import resident_mb
from benchmarks.shared.results import Results, parser
from benchmarks.shared.rounds import in_turn
from benchmarks.shared.servers import pool_process

GPUS = 64
BUFFER_BYTES = 4096
MOST = 1.5
ROOMY = {
    "GPU_POOL_MAX_QUEUED": "100000",
    "GPU_POOL_MAX_QUEUED_PER_OWNER": "100000",
    "GPU_POOL_MAX_LEASES_PER_OWNER": "100000",
}


@dataclass(frozen=True)
class Effort:
    readers: int
    leases: int
    rounds: int


QUICK = Effort(readers=5, leases=100, rounds=1)
WHOLE = Effort(readers=200, leases=500, rounds=3)


def fill(port: int, leases: int) -> int:
    """Fill the pool and its queue; return the size of the answer of `/pool`."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        for number in range(leases):
            form = {"ttl_s": 3600.0, "labels": {f"label{index}": "x" * 250 for index in range(14)}}
            connection.request("PUT", f"/leases/lease-{number}", json.dumps(form).encode())
            response = connection.getresponse()
            body = response.read()
            assert response.status in {201, 202}, body
    return len(whole_answer(port))


def whole_answer(port: int) -> bytes:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", "/pool")
        return connection.getresponse().read()


def ask(port: int) -> socket.socket:
    """Ask for the pool on a new connection, and read nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", port))
    connection.sendall(b"GET /pool HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    return connection


def measure(readers: int, effort: Effort) -> tuple[float, int]:
    """The server's memory in MB with so many readers that do not read, and the size of the answer."""
    with (
        tempfile.TemporaryDirectory(prefix="slow-readers-") as folder,
        pool_process(Path(folder), str(GPUS), "normal", ROOMY) as (port, pid),
        ExitStack() as stack,
    ):
        size = fill(port, effort.leases)
        # All at once: the server makes one answer for all that wait for it.
        for connection in [stack.enter_context(ask(port)) for _ in range(readers)]:
            assert connection.recv(12).startswith(b"HTTP/1.1 200")
        whole_answer(port)
        return resident_mb(pid), size


def main() -> None:
    options = parser(__doc__).parse_args()
    effort = QUICK if options.quick else WHOLE
    results = Results("slow_readers", "The memory of a server whose readers do not read.")
    sizes: list[int] = []

    def run(readers: int) -> float:
        used_mb, size = measure(readers, effort)
        sizes.append(size)
        return used_mb

    found = in_turn({"none": lambda: run(0), "slow": lambda: run(effort.readers)}, effort.rounds)
    none_mb, slow_mb = statistics.median(found["none"]), statistics.median(found["slow"])
    results.table(
        f"{effort.leases:,} leases, an answer of {sizes[0] / 1e6:.1f} MB: medians of {effort.rounds} alternating rounds",
        ["", "memory, MB", "answers that were not taken, MB"],
        [
            ["no reader that does not read", none_mb, 0.0],
            [f"{effort.readers} readers that do not read", slow_mb, effort.readers * sizes[0] / 1e6],
        ],
    )
    results.figure(
        "slow_readers",
        f"memory of the server with {effort.readers} readers that do not read, relative to none",
        value=slow_mb / none_mb,
        unit="x",
        target=f"<= {MOST} x (our interpretation)",
        is_met=slow_mb <= MOST * none_mb,
        why="readers that do not read cost the server memory",
    )
    results.finish(options)


if __name__ == "__main__":
    main()
