"""What a lease costs the server, in counts: they are the same on a busy machine, where no time can be held to a limit.

A number that has become smaller is good news: lower it here. One that has become larger makes every lease slower.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections import Counter
from contextlib import closing
from typing import Any

import pytest

from benchmarks.leases.locks import delete, put, size_of_answer, who_asks
from gpu_worker_pool.testing import ServerProcess
from tests.server.counted_server import FILE
from tests.server.leasing import eventually

SOON_S = 30.0
CYCLES = 30
BOTH = {
    "commits": 1,
    "hand-overs between threads": 1,
    # None of these two: what a call waits for, its commit, has a callback.
    "tasks": 0,
    "messages by uvicorn": 0,
    # The caller's, and the one of the commit.
    "futures": 2,
    # The end of the turn, the flush, the answer, and those that show what happened.
    "callbacks": 4,
    # uvicorn's, which closes a connection that is not used.
    "timers": 1,
    "answers in one write": 1,
    # The journal before the commit, and its log before and after it.
    "files looked at": 3,
    # The high-water mark.
    "files written, without SQLite": 1,
    "files opened": 0,
    "steps of the core": 1,
    "decisions: Tick": 1,
}
AT_MOST: dict[str, dict[str, int]] = {
    "PUT alone": {**BOTH, "decisions: RequestLease": 1, "decisions: ServeQueue": 1},
    # No waiter can have the GPU before it is read: there is no pass over the queue.
    "DELETE alone": {**BOTH, "decisions: Release": 1},
    # Until the next holder, which waits, has its answer: a reading shows that the GPUs are free, and the grant is written.
    "DELETE after": {
        "commits": 2,
        "hand-overs between threads": 3,
        "tasks": 0,
        "messages by uvicorn": 0,
        # One and two fewer if the reading comes after the first commit.
        "futures": 3,
        "callbacks": 9,
        "timers": 2,
        "answers in one write": 2,
        "files looked at": 7,
        "files written, without SQLite": 2,
        # The list of sockets, for the marks of holders.
        "files opened": 1,
        "steps of the core": 2,
        "decisions: Tick": 2,
        "decisions: Release": 1,
        "decisions: Observe": 1,
        "decisions: ServeQueue": 1,
    },
}


class Client:
    """A connection that requests and releases leases."""

    def __init__(self, server: ServerProcess) -> None:
        self._connection = socket.create_connection(("127.0.0.1", server.port), timeout=SOON_S)
        self._body = {**who_asks(), "wait_s": 25.0}

    def send(self, method: str, lease_id: str, **wishes: object) -> None:
        request = put(lease_id, json.dumps({**self._body, **wishes}).encode()) if method == "PUT" else delete(lease_id)
        self._connection.sendall(request)

    def answer(self) -> dict[str, Any]:
        received, size = b"", None
        while size is None or len(received) < size:
            received += self._connection.recv(65536)
            size = size or size_of_answer(received)
        found: dict[str, Any] = json.loads(received.partition(b"\r\n\r\n")[2])
        return found

    def call(self, method: str, lease_id: str, **wishes: object) -> dict[str, Any]:
        self.send(method, lease_id, **wishes)
        return self.answer()

    def close(self) -> None:
        self._connection.close()


def one_after_the_other(server: ServerProcess) -> None:
    with closing(Client(server)) as client:
        for number in range(CYCLES):
            assert client.call("PUT", f"alone-{number}")["state"] == "active"
            assert client.call("DELETE", f"alone-{number}")["state"] == "ended"


def each_waits_for_the_one_before(server: ServerProcess) -> None:
    with closing(Client(server)) as first, closing(Client(server)) as second:
        holder, waiter = first, second
        assert holder.call("PUT", "after-0", gpus=CYCLES)["state"] == "active"
        for number in range(1, CYCLES):
            waiter.send("PUT", f"after-{number}", gpus=CYCLES)
            # Answered once its request is written; then it waits.
            eventually(lambda n=number: server.ask(f"/leases/after-{n}").json.get("state") == "queued", "it waits")  # type: ignore[misc]
            assert holder.call("DELETE", f"after-{number - 1}")["state"] == "ended"
            assert waiter.answer()["state"] == "active"
            holder, waiter = waiter, holder


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counter[str]]:
    """The least counts of each kind of call: a reading of the GPUs, or a pause of the machine, may come in between."""
    file = tmp_path_factory.mktemp("counts") / "counts.json"
    command = (sys.executable, "-m", "tests.server.counted_server")
    settings = {"SIMULATED_GPUS": str(CYCLES), "REFRESH_INTERVAL": "60", FILE: str(file)}
    with ServerProcess(settings, command=command) as server:
        one_after_the_other(server)
        each_waits_for_the_one_before(server)
        os.kill(server.pid, signal.SIGUSR1)
        calls = json.loads(
            eventually(lambda: file.read_text(encoding="utf-8") if file.exists() else None, "the counts")
        )
    least: dict[str, Counter[str]] = {}
    for kind in AT_MOST:
        found = [Counter(counted) for made, counted in calls if made == kind]
        least[kind] = Counter({what: min(each[what] for each in found) for what in set().union(*found)})
    return least


@pytest.mark.parametrize("kind", AT_MOST)
def test_a_lease_call_costs_no_more_than_this(counts: dict[str, Counter[str]], kind: str) -> None:
    known = AT_MOST[kind]
    more = {what: (number, known.get(what, 0)) for what, number in counts[kind].items() if number > known.get(what, 0)}
    assert more == {}, "what has become more, with what it was"
