"""The server side of each contender: started in a folder of its own, on this machine only, and ended by its pid."""

from __future__ import annotations

import os
import pwd
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.contenders import namespaces
from benchmarks.contenders.processes import HERE, READY_S, Daemon, running, wait_until
from benchmarks.shared import servers as shared
from benchmarks.shared.servers import answers, free_port

# A usual timeout of a lock, so that it outlives a short pause of its holder.
REDIS_TTL_S = 30.0
RAY_OBJECT_STORE_BYTES = 100_000_000
# Unless it is told, a head asks for a token if it finds one in the user's home, where any `ray.init()` leaves one, and its
# drivers send none. Here no other machine or user reaches it.
RAY_ENV = {"RAY_AUTH_MODE": "disabled"}


@dataclass(frozen=True)
class Serving:
    """A server side that is ready: what its clients need, how long it took to start, and its processes."""

    settings: dict[str, Any]
    ready_s: float | None = None
    pids: Sequence[int] = ()
    # The interpreter of its clients, and what comes before it in their command.
    python: Sequence[str] = field(default=(sys.executable,))
    # The variables that its clients need.
    env: Mapping[str, str] = field(default_factory=dict)
    # Kills it and starts it again with what it has kept; it is ready when this returns.
    restart: Callable[[], None] | None = None
    # Ends what clients that were killed have left in its queue.
    clear: Callable[[], None] = lambda: None
    # Surrounds each measurement, for a server that is stopped while others are measured.
    awake: Callable[[], AbstractContextManager[None]] = nullcontext


Serve = Callable[[Path, int], AbstractContextManager[Serving]]


def pool(durability: str) -> Serve:
    """Return a function that runs this project's server with simulated GPUs."""

    @contextmanager
    def serve(folder: Path, gpus: int) -> Iterator[Serving]:
        began = time.monotonic()
        with shared.pool(folder, str(gpus), durability) as server:
            ready_s = time.monotonic() - began

            def restart() -> None:
                server.kill()
                server.start()

            yield Serving({"port": server.port}, ready_s, [server.pid], restart=restart)

    return serve


@contextmanager
def statistics(folder: Path, gpus: int) -> Iterator[Serving]:
    """Run the same server for statistics only: it reads them from an `nvidia-smi` that shows which GPUs are used.

    A GPU that a client has taken shows there at once, and for as long as the client's process lives.
    """
    used = folder.with_name(f"{folder.name}-used")
    used.mkdir()
    programs = folder.with_name(f"{folder.name}-bin")
    programs.mkdir()
    script = programs / "nvidia-smi"
    script.write_text(_nvidia_smi(used, gpus), encoding="utf-8")
    script.chmod(0o755)
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "REFRESH_INTERVAL": "0.1", "SIMULATED_GPUS": ""}
    began = time.monotonic()
    with shared.pool(folder, "", "normal", env) as server:
        yield Serving({"port": server.port, "folder": str(used)}, time.monotonic() - began, [server.pid])


def redis(*, is_durable: bool) -> Serve:
    """Return a function that runs Redis with a list of the free GPUs.

    It has its default settings, or syncs each change to the disk before it answers.
    """

    @contextmanager
    def serve(folder: Path, gpus: int) -> Iterator[Serving]:
        python, server = peers.python_with("redis"), peers.program("redis-server")
        port = free_port()
        folder.mkdir()
        durable = ["--appendonly", "yes", "--appendfsync", "always"] if is_durable else []
        began = time.monotonic()
        command = [str(server), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), *durable]
        with Daemon(command, folder / "log", lambda: answers(port, b"PING\r\n", b"+PONG")) as daemon:
            ready_s = time.monotonic() - began
            numbers = " ".join(str(gpu) for gpu in range(gpus))
            assert answers(port, f"RPUSH gpus {numbers}\r\n".encode(), b":")
            settings = {"port": port, "gpus": gpus, "ttl_s": REDIS_TTL_S}
            yield Serving(settings, ready_s, [daemon.pid], [str(python)], restart=daemon.restart)

    return serve


@contextmanager
def files(folder: Path, gpus: int) -> Iterator[Serving]:
    """Make a folder for the files of filelock, which has no server."""
    python = peers.python_with("filelock")
    folder.mkdir()
    yield Serving({"folder": str(folder), "gpus": gpus}, python=[str(python)])


@contextmanager
def postgres(folder: Path, gpus: int) -> Iterator[Serving]:
    """Run PostgreSQL with its default settings and enough connections. Creating its files is not part of its start."""
    python = peers.python_with("psycopg")
    server, initdb = peers.program("postgres"), peers.program("initdb")
    folder.mkdir()
    port = free_port()
    # It refuses to run as root. Then another user runs it, who must be able to reach its files.
    user = _harmless_user()
    who: dict[str, Any] = {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    with tempfile.TemporaryDirectory(prefix="bench-pg-") as name:
        if user is not None:
            os.chown(name, user.pw_uid, user.pw_gid)
        data = Path(name) / "data"
        make = [str(initdb), "-D", str(data), "-A", "trust", "-U", "bench", "--no-sync", "--no-locale", "-E", "UTF8"]
        subprocess.run(make, check=True, capture_output=True, timeout=READY_S, cwd=name, **who)
        began = time.monotonic()
        options = {"listen_addresses": "127.0.0.1", "unix_socket_directories": name, "max_connections": "200"}
        command = [
            str(server),
            "-D",
            str(data),
            "-p",
            str(port),
            *(f"--{key}={value}" for key, value in options.items()),
        ]
        with running(command, folder / "log", cwd=name, **who) as pid:
            mark = data / "postmaster.pid"
            wait_until(
                lambda: mark.exists() and mark.read_text(encoding="utf-8").rstrip().endswith("ready"), folder / "log"
            )
            address = f"host=127.0.0.1 port={port} user=bench dbname=postgres"
            yield Serving({"address": address, "gpus": gpus}, time.monotonic() - began, [pid], [str(python)])


@contextmanager
def scheduler(folder: Path, gpus: int) -> Iterator[Serving]:
    """Run simple_gpu_scheduler, which reads its commands from a named pipe, so that several processes can ask it."""
    python = peers.python_with("simple_gpu_scheduler")
    folder.mkdir()
    lines = folder / "lines"
    os.mkfifo(lines)
    numbers = [str(gpu) for gpu in range(gpus)]
    # Opened for reading and writing, so that the scheduler sees no end of the file while no client has it open.
    descriptor = os.open(lines, os.O_RDWR | os.O_CLOEXEC)
    began = time.monotonic()
    try:
        with running(
            [python, "-m", "simple_gpu_scheduler.scheduler", "--gpus", *numbers], folder / "log", stdin=descriptor
        ) as pid:
            holder = shlex.join([str(python), "-I", "-S", str(HERE / "desk.py")])
            settings = {"lines": str(lines), "folder": str(folder), "holder": holder}
            yield Serving(settings, time.monotonic() - began, [pid])
    finally:
        os.close(descriptor)


@contextmanager
def command(folder: Path, gpus: int) -> Iterator[Serving]:  # noqa: ARG001 - as all others
    """Make a folder for a client that starts a command itself, without a server."""
    folder.mkdir()
    yield Serving({"folder": str(folder), "python": sys.executable})


@contextmanager
def ray(folder: Path, gpus: int) -> Iterator[Serving]:
    """Run a node of Ray without its dashboard, in a network namespace of its own."""
    python = peers.python_with("ray")
    folder.mkdir()
    log = folder / "log"
    port = free_port()
    start = [str(python.with_name("ray")), "start", "--head", "--block", f"--port={port}", f"--num-gpus={gpus}"]
    start += [
        # Ray starts no more processes at a time than this, so a grant must not wait for the number of processors.
        f"--num-cpus={gpus}",
        "--include-dashboard=false",
        "--include-log-monitor=false",
        "--disable-usage-stats",
    ]
    # Its sockets have long names, and the path of a socket must not be longer than 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as name:
        start += [f"--object-store-memory={RAY_OBJECT_STORE_BYTES}", f"--temp-dir={name}"]
        began = time.monotonic()
        with namespaces.running_alone(start, log, RAY_ENV) as (pid, joined):
            wait_until(lambda: "Ray runtime started" in log.read_text(encoding="utf-8", errors="replace"), log)
            settings = {"address": f"127.0.0.1:{port}", "folder": name, "gpus": gpus}
            yield Serving(settings, time.monotonic() - began, [pid], [*joined, str(python)], RAY_ENV)


def _nvidia_smi(used: Path, gpus: int) -> str:
    """Return a script that shows a GPU as used while there is a file GPU.PID.NUMBER of a process that lives."""
    return f"""#!/bin/sh
case "$*" in *compute-apps*) exit 0 ;; esac
for gpu in {" ".join(str(gpu) for gpu in range(gpus))}; do
  use="500, 0"
  for file in {shlex.quote(str(used))}/$gpu.*; do
    pid=${{file##*/}}; pid=${{pid#*.}}; pid=${{pid%.*}}
    [ -e "$file" ] && [ -d "/proc/$pid" ] && use="60000, 90"
  done
  echo "$gpu, GPU-00000000-0000-0000-0000-00000000000$gpu, Pretended, 81920, $use, 40, 100, 400"
done
"""


def _harmless_user() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    return known.get("postgres") or known["nobody"]
