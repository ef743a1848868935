"""A server that is told to stop answers the calls that are under way."""

from __future__ import annotations

import json
import signal
import socket
import sys
from pathlib import Path

from gpu_worker_pool.testing import ServerProcess
from tests.server.leasing import eventually

SOON_S = 30.0
# A server whose disk hangs at the first write of a lease, and says so by a file.
HANGING = """
import pathlib, runpy, sys, threading
from gpu_worker_pool.core.model.events import LeaseQueued, LeaseGranted
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal

append = SqliteJournal.append

def hang(journal, events, ended):
    if any(isinstance(event, LeaseQueued | LeaseGranted) for event in events):
        pathlib.Path("hangs").touch()
        threading.Event().wait()
    append(journal, events, ended)

SqliteJournal.append = hang
runpy.run_module("gpu_worker_pool.testing", run_name="__main__", alter_sys=True)
"""


def test_a_call_whose_write_hangs_is_answered_with_a_problem(tmp_path: Path) -> None:
    with ServerProcess(command=(sys.executable, "-c", HANGING), folder=tmp_path) as server:
        assert server.process is not None
        with socket.create_connection(("127.0.0.1", server.port), timeout=SOON_S) as caller:
            caller.sendall(b"PUT /leases/a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
            eventually((tmp_path / "hangs").exists, "the write hangs")
            server.process.send_signal(signal.SIGTERM)
            head, _, body = b"".join(iter(lambda: caller.recv(4000), b"")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 "), head
        assert b"content-type: application/problem+json" in head
        assert "stopping" in json.loads(body)["detail"]
        server.process.kill()
