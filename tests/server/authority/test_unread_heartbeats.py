"""A heartbeat that waits in a socket while the server is away saves its lease, however late the server reads it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from contextlib import ExitStack, closing

from gpu_worker_pool.testing import ServerProcess
from tests.server.leasing import eventually, get, take
from tests.server.running import ask_over

TTL_S = 1.0


def heartbeat(lease_id: str) -> bytes:
    body = json.dumps({"ids": [lease_id]}).encode()
    head = f"POST /leases/renew HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def test_no_lease_expires_while_its_heartbeat_waits_in_a_socket() -> None:
    with ServerProcess({"SIMULATED_GPUS": "3", "LOG_LEVEL": "error"}) as server, ExitStack() as stack:
        assert server.process is not None
        known = stack.enter_context(closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)))
        assert ask_over(known, "/livez").status == 200
        assert known.sock is not None
        for lease_id in ("known", "new", "silent"):
            take(server, lease_id, ttl_s=TTL_S)
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            known.sock.sendall(heartbeat("known"))
            new = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            new.sendall(heartbeat("new"))
            is_over = time.monotonic() + 1.5 * TTL_S
            eventually(lambda: time.monotonic() > is_over, "the TTL is over")
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        for connection, lease_id in ((known.sock, "known"), (new, "new")):
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            outcome = json.loads(answer.read())
            assert [renewed["id"] for renewed in outcome["renewed"]] == [lease_id], outcome
        eventually(lambda: get(server, "silent")["state"] != "active", "a lease without a heartbeat expires")
