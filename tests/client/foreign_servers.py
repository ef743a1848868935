"""Servers that are not ours, or are in a bad way: real HTTP on loopback, in a thread of its own, doing as it is told.

with ForeignServer(statistics()) as server:
    server.behaviour = garbage
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.listener import ListenerThread

# More than a client of ours reads.
HUGE_BYTES = 17 * 1024 * 1024
JSON = "application/json"


@dataclass(frozen=True)
class Seen:
    """A request as it came in."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def lease_id(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Behaviour = Callable[[Seen, asyncio.StreamWriter], Awaitable[None]]
Answering = Callable[[Seen], Awaitable[tuple[int, Any]]]


class ForeignServer(ListenerThread):
    """Listens from entering to leaving; `behaviour` may be changed at any time, and `seen` is all that was asked."""

    def __init__(self, behaviour: Behaviour, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(port, tls)
        self.behaviour = behaviour
        self.seen: list[Seen] = []

    def asked(self, method: str, path_start: str = "") -> list[Seen]:
        """What was asked with this method."""
        return [seen for seen in self.seen if seen.method == method and seen.path.startswith(path_start)]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not writer.is_closing():
                seen = await _read(reader)
                self.seen.append(seen)
                # A caller that hangs up is let go, whatever is being done for it.
                answering = asyncio.ensure_future(self.behaviour(seen, writer))
                gone = asyncio.ensure_future(_wait_for_end(reader))
                try:
                    await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    gone.cancel()
                    if not answering.done():
                        answering.cancel()
                    await asyncio.gather(answering, gone, return_exceptions=True)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()


async def _read(reader: asyncio.StreamReader) -> Seen:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    method, target, _ = first.split(" ")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)
    }
    return Seen(method, target, headers, await reader.readexactly(int(headers.get("content-length", "0"))))


async def _wait_for_end(reader: asyncio.StreamReader) -> None:
    # No caller sends the next request before it has the answer to this one, so whatever there is to read is the end.
    while not reader.at_eof():  # noqa: ASYNC110 - a stream has no event for its end
        await asyncio.sleep(0.01)


def encoded(status: int, body: bytes, kind: str = JSON, **headers: str) -> bytes:
    fields = {"Content-Type": kind, "Content-Length": str(len(body)), **headers}
    lines = [f"HTTP/1.1 {status} Whatever", *(f"{name.replace('_', '-')}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(OSError):
        writer.write(data)
        await writer.drain()


# --- behaviours ----------------------------------------------------------------------------------------------------


def answering(answer: Answering) -> Behaviour:
    """Answers with JSON."""

    async def behave(seen: Seen, writer: asyncio.StreamWriter) -> None:
        status, found = await answer(seen)
        await _send(writer, encoded(status, json.dumps(found).encode()))

    return behave


def saying(status: int, body: bytes, kind: str = JSON, **headers: str) -> Behaviour:
    """Says always the same."""

    async def behave(_: Seen, writer: asyncio.StreamWriter) -> None:
        await _send(writer, encoded(status, body, kind, **headers))

    return behave


garbage = saying(200, b"\x00\xff<html>hello</html>", "text/html")
internal_error = saying(500, b"<h1>Internal Server Error</h1>", "text/html")
not_found = saying(404, b'{"detail": "Not Found"}')


def redirecting(to: str) -> Behaviour:
    """Sends everybody elsewhere, keeping method and path."""

    async def behave(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await _send(writer, encoded(307, b"", Location=f"{to}{seen.target}"))

    return behave


async def hanging(_: Seen, writer: asyncio.StreamWriter) -> None:
    """Takes the request and never answers."""
    await asyncio.Event().wait()


async def closing(_: Seen, writer: asyncio.StreamWriter) -> None:
    """Hangs up instead of answering."""
    writer.transport.abort()


async def breaking_off(_: Seen, writer: asyncio.StreamWriter) -> None:
    """Hangs up in the middle of its answer."""
    await _send(writer, encoded(200, b"x" * 1000)[:-500])
    writer.close()


async def no_http(_: Seen, writer: asyncio.StreamWriter) -> None:
    """Speaks something else."""
    await _send(writer, b"220 mail.example ESMTP\r\n")
    writer.close()


async def huge(_: Seen, writer: asyncio.StreamWriter) -> None:
    """Streams more than anybody should read."""
    await _send(writer, b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk = b'{"a": "' + b"a" * 65529
    sent = 0
    while sent <= HUGE_BYTES:
        if writer.is_closing():
            return
        await _send(writer, b"%x\r\n%s\r\n" % (len(chunk), chunk))
        sent += len(chunk)
    await _send(writer, b"0\r\n\r\n")


def slowed(behaviour: Behaviour, by_s: float) -> Behaviour:
    """As the other, but later."""

    async def behave(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(by_s)
        await behaviour(seen, writer)

    return behave


def statistics(gpus: int = 2, memory_percent: float = 1.0) -> Behaviour:
    """What the documents' server shows of its GPUs, and nothing else."""
    summary = [
        {
            "gpu_id": index,
            "name": "NVIDIA GeForce RTX 3080",
            "memory_usage_percent": memory_percent,
            "utilization_percent": 2,
        }
        for index in range(gpus)
    ]
    memory = {"total_mb": 10240, "used_mb": 102.4 * memory_percent, "free_mb": 0, "usage_percent": memory_percent}
    stats = [{"gpu_id": item["gpu_id"], "name": item["name"], "memory": memory} for item in summary]
    pages: dict[str, Any] = {
        "/gpu/summary": {"gpu_count": gpus, "gpus_summary": summary, "timestamp": "2025-07-23T10:30:00.123456"},
        "/gpu/stats": {"gpu_count": gpus, "gpus": stats, "timestamp": "2025-07-23T10:30:00.123456"},
    }

    async def answer(seen: Seen) -> tuple[int, Any]:
        found = pages.get(seen.path) if seen.method == "GET" else None
        return (404, {"detail": "Not Found"}) if found is None else (200, found)

    return answering(answer)


class Gate:
    """Shut until somebody opens it, from whatever thread."""

    def __init__(self, *, is_open: bool = False) -> None:
        self._open: Future[None] = Future()
        if is_open:
            self.open()

    def open(self) -> None:
        if not self._open.done():
            self._open.set_result(None)

    async def passed(self) -> None:
        await asyncio.shield(asyncio.wrap_future(self._open))


def lease(lease_id: str, state: str, **facts: Any) -> dict[str, Any]:
    """A lease as a server with leases shows it."""
    gpu = {"node": "foreign", "gpu_id": 0, "uuid": "GPU-foreign", "name": "Foreign GPU"}
    gpus = [gpu] if state == "active" else []
    return {
        "id": lease_id,
        "state": state,
        "reason": "because",
        "position": 1,
        "gpus": gpus,
        "fence": 7,
        "env": {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0"} if gpus else {},
    } | facts


@dataclass
class ScriptedLeases:
    """A server with leases on one GPU that says what the test wants said. Each answer is (status, body), or a function of
    the request that gives one.
    """

    pool: Any = None
    put: Any = None
    get: Any = None
    renew: Any = None
    delete: Any = None
    deleted: list[str] = field(default_factory=list)

    def behaviour(self) -> Behaviour:
        return answering(self._answer)

    async def _answer(self, seen: Seen) -> tuple[int, Any]:
        match seen.method, seen.path:
            case "GET", "/pool":
                told, usual = self.pool, (200, self.empty_pool())
            case "PUT", _:
                told, usual = self.put, (201, lease(seen.lease_id, "active"))
            case "GET", _:
                told, usual = self.get, (200, lease(seen.lease_id, "active"))
            case "POST", "/leases/renew":
                ids = seen.json["ids"]
                told, usual = (
                    self.renew,
                    (200, {"renewed": [{"id": id_, "expires_in_s": 30} for id_ in ids], "lost": []}),
                )
            case "DELETE", _:
                told, usual = self.delete, (200, lease(seen.lease_id, "ended"))
                self.deleted.append(seen.lease_id)
            case _:
                return 404, {"detail": "Not Found"}
        if callable(told):
            told = await told(seen)
        found: tuple[int, Any] = usual if told is None else told
        return found

    @staticmethod
    def empty_pool() -> dict[str, Any]:
        gpu = {
            "gpu_id": 0,
            "uuid": "GPU-foreign",
            "name": "Foreign GPU",
            "state": "free",
            "memory_total_mb": 10240,
            "memory_used_mb": 100,
            "utilization_percent": 1,
        }
        return {"node": "foreign", "gpus": [gpu], "leases": [], "queue": [], "queue_length": 0, "can_grant": True}
