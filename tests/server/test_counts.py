"""What a lease and a poll cost the server, in counts: they are the same on a busy machine, where no time can be held to a limit.

A number that has become smaller is good news: lower it here. One that has become larger makes every lease, or every poll, slower.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.server.counted_server import FILE
from tests.server.leasing import eventually

SOON_S = 30.0
CYCLES = 30
BOTH = {
    "commits": 1,
    "hand-overs between threads": 1,
    # That of the call, which waits for its commit.
    "tasks": 1,
    "futures": 1,
    # The head of the answer, and its body.
    "messages by uvicorn": 2,
    # The end of the turn, the start and the end of the task, its wait, and the late listeners.
    "callbacks": 5,
    # The time for the body, and the one that closes a connection which is not used.
    "timers": 3,
    "heads of requests read": 1,
    # The line of the access log.
    "records of the log": 1,
    # The journal before the commit, and its log before and after it.
    "files looked at": 3,
    # The high-water mark.
    "files written, without SQLite": 1,
    "files opened": 0,
    "steps of the core": 1,
}
# Also by whom a lease was ended.
RELEASED = {"records of the log": 2}
# Only a server of a fleet, or the page of the documents, or a command needs these.
NEVER_LOADED = {
    "asyncpg",
    "gpu_worker_pool.client",
    "gpu_worker_pool.core.fleet.election",
    "gpu_worker_pool.server.agent.agent",
    "pynvml",
    "websockets",
}
# The server, which writes at SIGUSR1 what it has loaded.
WRITES_MODULES = """
import pathlib, runpy, signal, sys
file = pathlib.Path("{file}")
signal.signal(signal.SIGUSR1, lambda *_: (file.with_suffix(".new").write_text(" ".join(sys.modules)), file.with_suffix(".new").rename(file)))
runpy.run_module("gpu_worker_pool.testing", run_name="__main__", alter_sys=True)
"""
AT_MOST: dict[str, dict[str, int]] = {
    # Whether `gpu-pool enforce` refuses devices here: then the environment names GPUs by UUID.
    "PUT alone": {**BOTH, "files opened": 1, "decisions: RequestLease": 1, "decisions: ServeQueue": 1},
    # No waiter can have the GPU before it is read: there is no pass over the queue.
    "DELETE alone": {**BOTH, **RELEASED, "decisions: Release": 1},
    # The middleware has its body.
    "GET summary": {
        "tasks": 1,
        "callbacks": 2,
        "timers": 1,
        "messages by uvicorn": 2,
        "heads of requests read": 1,
        "records of the log": 1,
    },
    # A waiter wants more GPUs than leases leave: no reading serves it, so none is taken at once.
    "DELETE beside": {**BOTH, **RELEASED, "decisions: Release": 1, "decisions: ServeQueue": 1},
    # Until the next holder, which waits, has its answer: a reading shows that the GPUs are free, and the end and the grant
    # are written in one commit.
    "DELETE after": {
        "records of the log": 3,
        "commits": 1,
        "hand-overs between threads": 2,
        "tasks": 1,
        "futures": 1,
        "messages by uvicorn": 4,
        "callbacks": 9,
        # Also that of the commit, which waits no longer than a little for the reading.
        "timers": 5,
        "heads of requests read": 1,
        "files looked at": 4,
        "files written, without SQLite": 1,
        "steps of the core": 2,
        "decisions: Tick": 1,
        "decisions: Release": 1,
        "decisions: Observe": 1,
        "decisions: ServeQueue": 2,
    },
}


class FreshServer(ServerProcess):
    """Not forked from a process that has loaded all of the server already, as those of other tests."""

    popen: ClassVar[type[subprocess.Popen[bytes]]] = subprocess.Popen


def who_asks() -> dict[str, object]:
    """What a client sends about its process, so that its death frees the GPU."""
    stat = Path("/proc/self/stat").read_text(encoding="utf-8")
    return {
        "worker_id": f"worker-{os.getpid()}",
        "owner": "counted",
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_started": int(stat.rpartition(")")[2].split()[19]),
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
        "pid_namespace": str(Path("/proc/self/ns/pid").readlink()),
        "ttl_s": 30.0,
    }


class Client:
    """A connection that requests and releases leases."""

    def __init__(self, server: ServerProcess) -> None:
        self._connection = socket.create_connection(("127.0.0.1", server.port), timeout=SOON_S)
        self._body = {**who_asks(), "wait_s": 25.0}

    def send(self, method: str, lease_id: str, **wishes: object) -> None:
        body = json.dumps({**self._body, **wishes}).encode() if method == "PUT" else b""
        head = f"{method} /leases/{lease_id} HTTP/1.1\r\nHost: localhost\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self._connection.sendall(f"{head}\r\n".encode() + body)

    def answer(self) -> dict[str, Any]:
        head, body = b"", b""
        while not head:
            body += self._connection.recv(65536)
            head, _, body = body.partition(b"\r\n\r\n") if b"\r\n\r\n" in body else (b"", b"", body)
        length = int(head.lower().partition(b"content-length:")[2].split(maxsplit=1)[0])
        while len(body) < length:
            body += self._connection.recv(65536)
        found: dict[str, Any] = json.loads(body)
        return found

    def call(self, method: str, lease_id: str, **wishes: object) -> dict[str, Any]:
        self.send(method, lease_id, **wishes)
        return self.answer()

    def poll(self) -> dict[str, Any]:
        self._connection.sendall(b"GET /gpu/summary HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return self.answer()

    def close(self) -> None:
        self._connection.close()


def one_after_the_other(server: ServerProcess) -> None:
    with closing(Client(server)) as client:
        for number in range(CYCLES):
            assert client.call("PUT", f"alone-{number}")["state"] == "active"
            assert client.call("DELETE", f"alone-{number}")["state"] == "ended"


def beside_a_waiter_for_more_than_is_left(server: ServerProcess) -> None:
    with closing(Client(server)) as client, closing(Client(server)) as waiter:
        assert client.call("PUT", "half", gpus=CYCLES // 2)["state"] == "active"
        waiter.send("PUT", "all", gpus=CYCLES)
        eventually(lambda: server.ask("/leases/all").json.get("state") == "queued", "it waits")
        for number in range(CYCLES // 2):
            assert client.call("PUT", f"beside-{number}", priority=1)["state"] == "active"
            assert client.call("DELETE", f"beside-{number}")["state"] == "ended"
        assert client.call("DELETE", "half")["state"] == "ended"
        assert waiter.answer()["position"] == 0
        assert client.call("DELETE", "all")["state"] == "ended"


def a_poll_after_the_other(server: ServerProcess) -> None:
    with closing(Client(server)) as client:
        for _ in range(CYCLES):
            assert client.poll()["gpu_count"] == CYCLES


def each_waits_for_the_one_before(server: ServerProcess) -> None:
    with closing(Client(server)) as first, closing(Client(server)) as second:
        holder, waiter = first, second
        assert holder.call("PUT", "after-0", gpus=CYCLES)["state"] == "active"
        for number in range(1, CYCLES):
            waiter.send("PUT", f"after-{number}", gpus=CYCLES)
            # Answered once its request is written; then it waits.
            eventually(lambda n=number: server.ask(f"/leases/after-{n}").json.get("state") == "queued", "it waits")  # type: ignore[misc]
            assert holder.call("DELETE", f"after-{number - 1}")["state"] == "ended"
            assert waiter.answer()["position"] == 0
            assert waiter.call("PUT", f"after-{number}", gpus=CYCLES)["state"] == "active"
            holder, waiter = waiter, holder


def what_is_written(server: ServerProcess, file: Path) -> str:
    """What a server writes to this file at SIGUSR1."""
    os.kill(server.pid, signal.SIGUSR1)
    return eventually(lambda: file.read_text(encoding="utf-8") if file.exists() else None, "the file")


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counter[str]]:
    """The least counts of each kind of call: a reading of the GPUs, or a pause of the machine, may come in between."""
    file = tmp_path_factory.mktemp("counts") / "counts.json"
    command = (sys.executable, "-m", "tests.server.counted_server")
    settings = {"SIMULATED_GPUS": str(CYCLES), "REFRESH_INTERVAL": "60", FILE: str(file)}
    with ServerProcess(settings, command=command) as server:
        one_after_the_other(server)
        a_poll_after_the_other(server)
        beside_a_waiter_for_more_than_is_left(server)
        each_waits_for_the_one_before(server)
        calls = json.loads(what_is_written(server, file))
    least: dict[str, Counter[str]] = {}
    for kind in AT_MOST:
        found = [Counter(counted) for made, counted in calls if made == kind]
        least[kind] = Counter({what: min(each[what] for each in found) for what in set().union(*found)})
    return least


@pytest.mark.parametrize("kind", AT_MOST)
def test_a_call_costs_no_more_than_this(counts: dict[str, Counter[str]], kind: str) -> None:
    known = AT_MOST[kind]
    more = {what: (number, known.get(what, 0)) for what, number in counts[kind].items() if number > known.get(what, 0)}
    assert more == {}, "what has become more, with what it was"


def test_a_server_of_one_box_does_not_load_what_others_need(tmp_path: Path) -> None:
    """What is loaded takes memory for as long as the server runs."""
    file = tmp_path / "modules"
    command = (sys.executable, "-c", WRITES_MODULES.format(file=file))
    with FreshServer({"SIMULATED_GPUS": str(CYCLES)}, command=command) as server:
        one_after_the_other(server)
        a_poll_after_the_other(server)
        loaded = set(what_is_written(server, file).split())
    assert "gpu_worker_pool.server.app" in loaded
    assert loaded & NEVER_LOADED == set()
