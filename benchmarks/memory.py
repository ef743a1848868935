"""The memory of an idle server, of a client that holds a GPU, and of a server whose readers do not read.

Memory is PSS: what several processes share is divided among them. A reader that does not read asks for `/pool` of a large pool and takes nothing of the answer. Its
socket has a small buffer, so that the answer stays with the server. benchmarks/agents weighs a leader of many GPUs.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shared.processes import pss_mb
from benchmarks.shared.results import Results, parser, show
from benchmarks.shared.rounds import spread
from benchmarks.shared.servers import ROOT, pool_process
from benchmarks.shared.targets import bounded, ratio

GPUS = 8
BUFFER_BYTES = 4096
MOST_SERVER_MB, MOST_CLIENT_MB, MOST_TIMES = 45.0, 25.0, 1.5
IDLE, FULL = "an idle server", "a server with a long queue"
NONE, SLOW = FULL, f"{FULL}, and readers that do not read"
CLIENT, AIOHTTP, BARE = "a program that holds a GPU", "a Python that has imported aiohttp", "a Python that does nothing"
PROGRAMS = {
    CLIENT: "import sys; from gpu_worker_pool import GPUWorkerPool; pool = GPUWorkerPool(sys.argv[1]); pool.start(); "
    "held = pool.request_gpu()",
    AIOHTTP: "import asyncio, aiohttp",
    BARE: "",
}
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
    settle_s: float


QUICK = Effort(readers=5, leases=50, rounds=1, settle_s=0.0)
WHOLE = Effort(readers=200, leases=500, rounds=2, settle_s=3.0)


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


@contextmanager
def program(source: str, *words: str) -> Iterator[int]:
    """Run a program that says when it is ready, and yield its pid."""
    command = [sys.executable, "-c", f"{source}\nimport sys, time; print('ready', flush=True); time.sleep(600)", *words]
    # In its folder, so that it finds the package, with no settings of the user.
    env = {"PATH": os.environ["PATH"], "GPU_POOL_SOCKET": ""}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n", "the program did not start"
            yield process.pid
        finally:
            process.kill()


def weigh(effort: Effort, readers: int, found: dict[str, list[float]]) -> int:
    """Weigh a server that is idle, that has a client, and with readers that do not read; return the size of an answer."""
    with (
        tempfile.TemporaryDirectory(prefix="memory-") as folder,
        pool_process(Path(folder), str(GPUS), "full", ROOMY) as (port, pid),
        ExitStack() as stack,
    ):
        time.sleep(effort.settle_s)
        found[IDLE].append(pss_mb(pid))
        for name, source in PROGRAMS.items() if not readers else ():
            with program(source, f"http://127.0.0.1:{port}") as client:
                found[name].append(pss_mb(client))
        size = fill(port, effort.leases)
        # All at once: the server makes one answer for all that wait for it.
        for connection in [stack.enter_context(ask(port)) for _ in range(readers)]:
            assert connection.recv(12).startswith(b"HTTP/1.1 200")
        whole_answer(port)
        found[SLOW if readers else NONE].append(pss_mb(pid))
        return size


def main() -> None:
    options = parser(__doc__).parse_args()
    effort = QUICK if options.quick else WHOLE
    results = Results("memory", "The memory of a server, of a client, and of a server whose readers do not read.")
    found: dict[str, list[float]] = {name: [] for name in (IDLE, *PROGRAMS, NONE, SLOW)}
    sizes = [weigh(effort, readers, found) for readers in (0, effort.readers) * effort.rounds]
    means = {name: statistics.fmean(values) for name, values in found.items()}
    results.table(
        f"Memory (PSS): means of {effort.rounds} rounds",
        ["", "MB", "rounds"],
        [[name, means[name], spread(values)] for name, values in found.items()],
        note=f"{FULL} has {effort.leases:,} leases and waiters, and its answer has {sizes[0] / 1e6:.1f} MB. There are {effort.readers} "
        f"readers, which do not take {effort.readers * sizes[0] / 1e6:.0f} MB. Other programs of Python on the machine make all of "
        "these values smaller, because they share its libraries.",
    )
    bounded(
        results,
        "memory_server",
        f"memory (PSS) of an idle server with {GPUS} GPUs",
        means[IDLE],
        "MB",
        most=MOST_SERVER_MB,
        spread=f"rounds: {spread(found[IDLE])}; a Python that does nothing: {show(means[BARE])} MB",
        why="not known; probably what it has imported",
    )
    bounded(
        results,
        "memory_client",
        "memory (PSS) of a program that holds a GPU by the blocking Python client",
        means[CLIENT],
        "MB",
        most=MOST_CLIENT_MB,
        spread=f"rounds: {spread(found[CLIENT])}; a Python that does nothing: {show(means[BARE])} MB; one that has imported "
        f"aiohttp: {show(means[AIOHTTP])} MB",
        why=f"a Python that has only imported aiohttp takes {show(means[AIOHTTP])} MB",
    )
    ratio(
        results,
        "slow_readers",
        f"memory of the server with {effort.readers} readers that do not read, relative to none",
        found[SLOW],
        found[NONE],
        most=MOST_TIMES,
        why="readers that do not read cost the server memory",
    )
    results.finish(options)


if __name__ == "__main__":
    main()
