"""Many clients at once in one asyncio process, each of which requests and releases a GPU as fast as it can."""

from __future__ import annotations

import asyncio
import json
import time

from benchmarks.leases.locks import delete, put, size_of_answer, who_asks


class Worker(asyncio.Protocol):
    """One keep-alive connection that requests a GPU, releases it once it has it, and starts again."""

    def __init__(self, name: str, body: bytes, until: float) -> None:
        self._name = name
        self._body = body
        self._until = until
        self._received = b""
        self._is_holding = False
        self.cycles = 0
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        size = size_of_answer(self._received)
        if size is None or len(self._received) < size:
            return
        answer, self._received = self._received, b""
        if b'"state":"queued"' in answer:
            # Set aside for this client: asking again takes the GPU up.
            self._ask()
            return
        if not answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 201")):
            self.done.set_exception(AssertionError(answer))
            self._transport.close()
            return
        if not self._is_holding:
            self._is_holding = True
            self._transport.write(delete(f"{self._name}-{self.cycles}"))
            return
        self._is_holding = False
        if time.monotonic() < self._until:
            self.cycles += 1
            self._ask()
        else:
            self.done.set_result(None)
            self._transport.close()

    def _ask(self) -> None:
        self._transport.write(put(f"{self._name}-{self.cycles}", self._body))


async def cycles_per_s(port: int, clients: int, seconds: float) -> float:
    """Return the releases a second of all clients together."""
    loop = asyncio.get_running_loop()
    body = json.dumps(who_asks()).encode()
    began = time.monotonic()
    run = f"{began:.6f}"
    workers: list[Worker] = []
    for number in range(clients):
        name = f"{run}-{number}"
        _, worker = await loop.create_connection(
            lambda name=name: Worker(name, body, began + seconds),  # type: ignore[misc]
            "127.0.0.1",
            port,
        )
        workers.append(worker)
    await asyncio.wait_for(asyncio.gather(*(worker.done for worker in workers)), seconds + 60)
    return sum(worker.cycles + 1 for worker in workers) / (time.monotonic() - began)
