"""Anybody who reaches the port of a box may knock: that costs little memory, and leaves no lines of the stranger's in the log."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from gpu_worker_pool.server.agent.frames import MOST_BYTES_OF_STRANGER, PATH
from gpu_worker_pool.server.leader.endpoint import MOST_STRANGERS
from gpu_worker_pool.testing import ServerProcess

ONE = "1" * 64
UNFINISHED_BYTES = 7 * 1024 * 1024


@pytest.fixture
def box(tmp_path: Path) -> Iterator[ServerProcess]:
    """A box that has no leader. It takes links as each box does."""
    settings = {
        "SIMULATED_GPUS": "1",
        "GPU_POOL_NODE": "box",
        "GPU_POOL_FLEET": "http://127.0.0.1:9",
        "GPU_POOL_FLEET_KEY": "a-key-that-is-long-enough",
    }
    with ServerProcess(settings, folder=tmp_path) as server:
        yield server


def knock(box: ServerProcess) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{box.port}{PATH}", proxy=None, compression=None, close_timeout=1)


def told(link: ClientConnection, **message: Any) -> list[Any]:
    """What the box answers to this message, until it closes the connection or waits for the next one."""
    link.send(json.dumps(message).encode())
    answers = []
    with suppress(ConnectionClosed):
        answers.append(json.loads(link.recv()))
        while answers[-1]["kind"] == "Rejected":
            link.recv()
    return answers


def memory_mb(box: ServerProcess) -> float:
    assert box.process is not None
    resident = int(Path(f"/proc/{box.process.pid}/statm").read_text().split()[1])
    return resident * os.sysconf("SC_PAGE_SIZE") / 1e6


def test_frames_of_strangers_are_refused_by_their_length(box: ServerProcess) -> None:
    before = memory_mb(box)
    for length in (MOST_BYTES_OF_STRANGER + 1, UNFINISHED_BYTES):
        with ExitStack() as stack:
            for _ in range(20):
                link = stack.enter_context(knock(box))
                # A binary frame of this length, masked, of which all but the last byte comes. The box reads on only if it keeps it.
                head = struct.pack("!BBQ", 0x82, 0x80 | 127, length) + bytes(4)
                with suppress(OSError):
                    link.socket.sendall(head + bytes(length - 1))
                with pytest.raises(ConnectionClosed):
                    link.recv()
    assert memory_mb(box) < before + 40


def test_so_many_may_knock_at_a_time(box: ServerProcess) -> None:
    with ExitStack() as stack:
        for _ in range(MOST_STRANGERS):
            stack.enter_context(knock(box))
        with pytest.raises(Exception, match="403"):
            knock(box)
        assert box.json("/gpu/count")["gpu_count"] == 1


def test_strangers_leave_nothing_of_their_own_in_the_log(box: ServerProcess) -> None:
    hello = {"kind": "Hello", "node": "gpu-02", "nonce": ONE, "version": "1"}
    for proof in ("\ud800", "short", 7, ONE):
        with knock(box) as link:
            (challenge,) = told(link, **hello)
            assert challenge["kind"] == "Hello"
            (refused,) = told(link, kind="Proof", proof=proof)
            assert refused["kind"] == "Rejected", proof
    for number in range(50):
        for node in (f"gpu\nERROR forged {number}", f"\x1b[2Jgpu-{number}", f"gpu-{number}"):
            with knock(box) as link:
                answers = told(link, **{**hello, "node": node})
                if answers[0]["kind"] == "Hello":
                    told(link, kind="Proof", proof=ONE)
    lines = box.log().splitlines()
    assert not [line for line in lines if line.startswith("ERROR forged") or "\x1b" in line]
    assert len([line for line in lines if "different fleet keys" in line]) == 1
    assert len([line for line in lines if PATH in line]) == 0
    assert "Traceback" not in box.log()


class Impostor:
    """Listens where a box looks for its leader, and answers each request with `answer`, again and again."""

    def __init__(self, answer: bytes, times: int = 1) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.answer, self.times = answer, times
        self.requests: Queue[bytes] = Queue()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connected, _ = self._listener.accept()
                with connected, suppress(OSError):
                    self.requests.put(connected.recv(65536))
                    for _ in range(self.times):
                        connected.sendall(self.answer)

    def close(self) -> None:
        self._listener.close()


def test_a_box_goes_nowhere_that_a_stranger_sends_it_and_reads_little_of_one(tmp_path: Path) -> None:
    with closing(Impostor(b"")) as elsewhere:
        health = json.dumps({"fleet": {"leader_url": elsewhere.url}}).encode()
        redirect = (
            f"HTTP/1.1 307 Temporary Redirect\r\nLocation: {elsewhere.url.replace('http', 'ws')}{PATH}\r\n"
            f"Content-Length: {len(health)}\r\n\r\n"
        ).encode()
        endless = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n" + b" " * 65536
        with closing(Impostor(redirect + health)) as sends, closing(Impostor(endless, 10_000)) as floods:
            settings = {
                "SIMULATED_GPUS": "1",
                "GPU_POOL_FLEET": f"{sends.url},{floods.url}",
                "GPU_POOL_FLEET_KEY": "a-key-that-is-long-enough",
            }
            with ServerProcess(settings, folder=tmp_path) as box:
                before = memory_mb(box)
                for impostor in (sends, floods) * 3:
                    impostor.requests.get(timeout=60)
                assert memory_mb(box) < before + 40
        assert elsewhere.requests.empty()
