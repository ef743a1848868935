"""Locks on one GPU, ours and those of Redis, all with the same two calls."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import os
import socket
import statistics
import time
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

TIMEOUT_S = 60.0


class Lock(Protocol):
    def acquire(self) -> None:
        """Wait until it is held."""
        ...

    def release(self) -> None: ...

    def close(self) -> None:
        """Close its connection and free what else it has."""
        ...


def cycle_s(lock: Lock, cycles: int, kept: list[float] | None = None) -> float:
    """Return the median of single cycles, which hides short disturbances by other processes. `kept` gets all of them."""
    times = []
    for _ in range(cycles):
        began = time.perf_counter()
        lock.acquire()
        lock.release()
        times.append(time.perf_counter() - began)
    if kept is not None:
        kept += times
    return statistics.median(times)


def is_installed(package: str) -> bool:
    return find_spec(package) is not None


def who_asks() -> dict[str, object]:
    """Return what a client sends about its process, so that its death frees the GPU."""
    stat = Path("/proc/self/stat").read_text(encoding="utf-8")
    return {
        "worker_id": f"worker-{os.getpid()}",
        "owner": "benchmark",
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_started": int(stat.rpartition(")")[2].split()[19]),
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
        "pid_namespace": str(Path("/proc/self/ns/pid").readlink()),
        "ttl_s": 30.0,
        "wait_s": 25.0,
    }


def put(lease_id: str, body: bytes) -> bytes:
    head = f"PUT /leases/{lease_id} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def delete(lease_id: str) -> bytes:
    return f"DELETE /leases/{lease_id} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def size_of_answer(received: bytes) -> int | None:
    """Return the length of the answer that begins here; None while its head is not complete."""
    end = received.find(b"\r\n\r\n")
    if end < 0:
        return None
    length = received[:end].lower().split(b"content-length:")[1].split(b"\r\n")[0]
    return end + 4 + int(length)


class PoolLease:
    """A lease of ours, over one keep-alive connection and a bare socket.

    `where` is a port of this machine, or the path of the server's Unix socket.
    """

    def __init__(self, where: int | Path, body: dict[str, object] | None = None) -> None:
        self._body = json.dumps(who_asks() if body is None else body).encode()
        run = uuid4().hex
        self._ids = (f"{run}-{number}" for number in count())
        self._id = ""
        if isinstance(where, Path):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(TIMEOUT_S)
            self._socket.connect(str(where))
        else:
            self._socket = socket.create_connection(("127.0.0.1", where), timeout=TIMEOUT_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def acquire(self) -> None:
        self._id = next(self._ids)
        lease = self._call(put(self._id, self._body))
        assert lease["state"] == "active", lease

    def release(self) -> None:
        lease = self._call(delete(self._id))
        assert lease["state"] == "ended", lease

    def close(self) -> None:
        self._socket.close()

    def _call(self, request: bytes) -> Any:
        self._socket.sendall(request)
        received, size = b"", None
        while size is None or len(received) < size:
            data = self._socket.recv(65536)
            assert data, "the server closed the connection"
            received += data
            size = size or size_of_answer(received)
        assert received.startswith(b"HTTP/1.1 20"), received
        return json.loads(received[received.index(b"\r\n\r\n") :])


class PoolLeaseByPythonClient:
    """A lease of ours by this project's blocking Python client, by the port, or by the Unix socket of the same server."""

    def __init__(self, port: int, path: Path | None = None) -> None:
        self._pool = importlib.import_module("gpu_worker_pool").GPUWorkerPool(f"http://127.0.0.1:{port}")
        # Empty: it uses no Unix socket. The client settles on one with its first calls.
        os.environ["GPU_POOL_SOCKET"] = str(path or "")
        self._pool.start()
        self.acquire()
        self.release()
        self._assignment: Any = None

    def acquire(self) -> None:
        self._assignment = self._pool.request_gpu(timeout=TIMEOUT_S)

    def release(self) -> None:
        self._pool.release_gpu(self._assignment)

    def close(self) -> None:
        self._pool.stop()


class RedisLock:
    """redis-py's own lock, over its persistent connection, with a timeout after which it expires, as a lease does.

    `sleep_s` is the pause between two tries while another client holds it; 0.1 is its default.
    """

    def __init__(self, port: int, sleep_s: float = 0.1) -> None:
        self._client = importlib.import_module("redis").Redis(host="127.0.0.1", port=port, socket_timeout=TIMEOUT_S)
        self._lock = self._client.lock("gpu", timeout=30, sleep=sleep_s)

    def acquire(self) -> None:
        assert self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def close(self) -> None:
        self._client.close()


class RedisLockByBareSocket:
    """The two commands that redis-py's lock sends, with its script, by a bare socket: what Redis itself takes."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        script = importlib.import_module("redis.lock").Lock.LUA_RELEASE_SCRIPT
        # Redis keeps the script that it has run once, under its hash.
        assert self._call("EVAL", script, "1", "gpu-bare", "") == b":0\r\n"
        self._script = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
        self._token = ""

    def acquire(self) -> None:
        self._token = uuid4().hex
        answer = self._call("SET", "gpu-bare", self._token, "PX", "30000", "NX")
        assert answer == b"+OK\r\n", answer

    def release(self) -> None:
        answer = self._call("EVALSHA", self._script, "1", "gpu-bare", self._token)
        assert answer == b":1\r\n", answer

    def close(self) -> None:
        self._socket.close()

    def _call(self, *words: str) -> bytes:
        parts = (f"${len(word)}\r\n{word}\r\n" for word in words)
        self._socket.sendall(f"*{len(words)}\r\n{''.join(parts)}".encode())
        received = b""
        while not received.endswith(b"\r\n"):
            data = self._socket.recv(65536)
            assert data, "the server closed the connection"
            received += data
        return received


class RedisAsyncioLock:
    """The same lock of redis-py by its asyncio client, which a program with an event loop would use."""

    def __init__(self, port: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = importlib.import_module("redis.asyncio").Redis(host="127.0.0.1", port=port)
        self._lock = self._client.lock("gpu-asyncio", timeout=30)

    def acquire(self) -> None:
        assert self._loop.run_until_complete(self._lock.acquire())

    def release(self) -> None:
        self._loop.run_until_complete(self._lock.release())

    def close(self) -> None:
        self._loop.run_until_complete(self._client.aclose())
        self._loop.close()
