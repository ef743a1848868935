"""The locks that are compared: what is timed, and what is sent."""

from __future__ import annotations

import socket
import sys
import threading
from types import SimpleNamespace

import pytest

from benchmarks.leases.locks import RedisLockByBareSocket, cycle_s


class Counted:
    """A lock that counts its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def acquire(self) -> None:
        self.calls.append("acquire")

    def release(self) -> None:
        self.calls.append("release")

    def close(self) -> None: ...


def test_all_cycles_are_kept_for_the_tail() -> None:
    lock, kept = Counted(), [1.0]

    median_s = cycle_s(lock, 3, kept)

    assert lock.calls == ["acquire", "release"] * 3
    assert len(kept) == 4
    assert median_s == sorted(kept[1:])[1]


def test_the_redis_lock_by_a_bare_socket_sends_two_commands_with_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(Lock=SimpleNamespace(LUA_RELEASE_SCRIPT="return 0"))
    monkeypatch.setitem(sys.modules, "redis.lock", library)
    asked: list[list[str]] = []

    def serve(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            for answer in (b":0", b"+OK", b":1"):
                asked.append(connection.recv(4096).decode().split("\r\n")[2::2])
                connection.sendall(answer + b"\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        lock = RedisLockByBareSocket(server.getsockname()[1])
        lock.acquire()
        lock.release()
        lock.close()
        thread.join()

    token = asked[1][2]
    assert asked == [
        ["EVAL", "return 0", "1", "gpu-bare", ""],
        ["SET", "gpu-bare", token, "PX", "30000", "NX"],
        ["EVALSHA", "06d3d9b2060dd51343d5f19f0e531f15c507e3d1", "1", "gpu-bare", token],
    ]
