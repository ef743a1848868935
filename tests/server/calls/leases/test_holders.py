"""What the holder of a lease is told: how long it lasts, and that another caller ended it."""

from __future__ import annotations

import http.client
import json
import os
import socket
from pathlib import Path
from typing import Any

from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.testing import Answer, ServerProcess
from tests.server.leasing import get, renew, take

ME: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}


def test_a_lease_of_a_local_process_does_not_expire(server: ServerProcess) -> None:
    lease = take(server, ttl_s=5, **ME)

    assert (lease["is_local"], lease["expires_in_s"], lease["ttl_s"]) == (True, None, 5)
    assert renew(server, lease["id"])["renewed"] == [{"id": lease["id"], "expires_in_s": None, "warning": None}]


def test_a_renewal_that_waits_tells_at_once_who_released_the_lease_and_why(server: ServerProcess) -> None:
    kept, lease_id = take(server, **ME)["id"], take(server, **ME)["id"]
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", "/leases/renew", json.dumps({"ids": [kept, lease_id], "wait_s": 60}))

    ended = server.ask(f"/leases/{lease_id}?reason=the%20demo", "DELETE").json

    answer = Answer.read(connection).json
    connection.close()
    assert [item["id"] for item in answer["renewed"]] == [kept]
    assert answer["lost"] == [{"id": lease_id, "reason": "released", "by": user_name(), "note": "the demo"}]
    assert (ended["ended_by"], ended["end_note"]) == (user_name(), "the demo")
    assert get(server, lease_id)["ended_by"] == user_name()


def test_the_log_says_who_ended_a_lease(server: ServerProcess) -> None:
    lease_id = take(server, **ME)["id"]
    server.ask(f"/leases/{lease_id}?reason=the%20demo", "DELETE")

    log = "".join(path.read_text(errors="replace") for path in Path(server.folder).glob("*log*"))
    assert f"lease {lease_id} was ended by {user_name()} (released): the demo" in log
