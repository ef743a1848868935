"""What the tests of leases ask for again and again."""

from __future__ import annotations

import http.client
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from gpu_worker_pool.testing import Answer, ServerProcess

T = TypeVar("T")
_numbers = itertools.count(1)

PROBLEM = "application/problem+json"
# For servers that many tests share: a GPU that was given back is free after the next look.
OFTEN = {"REFRESH_INTERVAL": "0.05"}
SOON_S = 20.0


def new_id(word: str = "lease") -> str:
    """An id that no other test has."""
    return f"{word}-{next(_numbers)}"


def put(
    server: ServerProcess, lease_id: str, *, query: str = "", headers: Mapping[str, str] | None = None, **form: Any
) -> Answer:
    return server.ask(f"/leases/{lease_id}{query}", "PUT", headers, form)


def take(server: ServerProcess, lease_id: str | None = None, **form: Any) -> dict[str, Any]:
    """A lease that must be granted at once."""
    answer = put(server, lease_id or new_id(), **form)
    assert answer.status == 201, answer
    lease: dict[str, Any] = answer.json
    assert lease["state"] == "active"
    return lease


def queue(server: ServerProcess, lease_id: str | None = None, **form: Any) -> dict[str, Any]:
    """A lease that must wait."""
    answer = put(server, lease_id or new_id("waiter"), **form)
    assert answer.status == 202, answer
    lease: dict[str, Any] = answer.json
    assert lease["state"] == "queued"
    return lease


def get(server: ServerProcess, lease_id: str, *, wait_s: float = 0.0, devices: str = "index") -> dict[str, Any]:
    """The lease as it is; its client gives a sign of life by it, and takes up the GPUs that were set aside while it waited."""
    answer = server.ask(f"/leases/{lease_id}?wait_s={wait_s}&devices={devices}")
    assert answer.status == 200, answer
    lease: dict[str, Any] = answer.json
    return get(server, lease_id, devices=devices) if is_set_aside(lease) else lease


def is_set_aside(lease: dict[str, Any]) -> bool:
    """Whether GPUs are kept for a waiter until its client calls again."""
    return (lease["state"], lease["position"]) == ("queued", 0)


def release(server: ServerProcess, lease_id: str) -> dict[str, Any]:
    answer = server.ask(f"/leases/{lease_id}", "DELETE")
    assert answer.status == 200, answer
    lease: dict[str, Any] = answer.json
    return lease


def renew(server: ServerProcess, *ids: str) -> dict[str, Any]:
    answer = server.ask("/leases/renew", "POST", body={"ids": list(ids)})
    assert answer.status == 200, answer
    found: dict[str, Any] = answer.json
    return found


def held(server: ServerProcess) -> set[str]:
    """Who holds something, seen without giving a sign of life for anybody."""
    return {lease["id"] for lease in server.json("/pool")["leases"]}


def queued(server: ServerProcess) -> list[str]:
    """Who waits, the next one first, seen without giving a sign of life for anybody."""
    return [lease["id"] for lease in server.json("/pool")["queue"]]


def gpu_states(server: ServerProcess) -> list[str]:
    return [gpu["state"] for gpu in server.json("/pool")["gpus"]]


def release_all(server: ServerProcess, headers: Mapping[str, str] | None = None) -> None:
    """Leave the pool as it was at first, for the next test."""
    pool = server.json("/pool")
    for lease in [*reversed(pool["queue"]), *pool["leases"]]:
        server.ask(f"/leases/{lease['id']}", "DELETE", headers)
    wait_until_free(server)


def wait_until_free(server: ServerProcess) -> None:
    eventually(lambda: set(gpu_states(server)) == {"free"}, "all GPUs are free")


def eventually(look: Callable[[], T | None], what: str, within_s: float = SOON_S) -> T:
    """What `look` sees as soon as it is something. Each look is a call that the server answers."""
    began = time.monotonic()
    while True:
        seen = look()
        if seen:
            return seen
        waited_s = time.monotonic() - began
        assert waited_s < within_s, f"not within {within_s:g} s: {what}; seen at last: {seen!r}"
        time.sleep(pause_s(waited_s))


def pause_s(waited_s: float) -> float:
    """How long until the next look: a look takes the processor from the process that is to bring it about."""
    return min(max(0.005, waited_s / 10), 0.05)


def assert_problem(answer: Answer, status: int, *words: str) -> str:
    """An error as RFC 9457 has it, whose detail holds these words."""
    assert answer.status == status, answer
    assert answer.headers["content-type"] == PROBLEM
    body = answer.json
    assert body["status"] == status
    assert body["type"] == "about:blank"
    assert body["title"]
    detail: str = body["detail"]
    assert len(detail) > 15, detail
    for word in words:
        assert word in detail, detail
    return detail


class LongPoll:
    """A call whose answer is read later."""

    def __init__(
        self,
        server: ServerProcess,
        path: str,
        method: str = "GET",
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._server, self._connection = server, http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        self._path, self._headers = path, dict(headers or {})
        self._connection.request(method, path, body, self._headers)

    def held(self) -> Self:
        """Wait until the server holds its answer back: what happens then comes after the call. No other call may wait."""
        line = b"\ngpupool_waiting_connections 1.0\n"
        eventually(lambda: line in self._server.ask("/metrics").body or None, "the call waits")
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def answer(self) -> Answer:
        return Answer.read(self._connection)

    def grant(self) -> Answer:
        """The answer to the next call of a client that was told that GPUs are set aside for it."""
        told = self.answer()
        assert is_set_aside(told.json), told
        assert told.json["gpus"] == [], "it can use none before it has taken them up"
        self._connection.request("GET", self._path.partition("?")[0], headers=self._headers)
        return self.answer()

    def close(self) -> None:
        """Hang up, answered or not."""
        self._connection.close()


@contextmanager
def a_process() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this machine that lives until it is killed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()
