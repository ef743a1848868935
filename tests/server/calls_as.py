"""Calls of a server as another Unix user: by its port, or by its Unix socket."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_worker_pool.testing import Answer, ServerProcess
from tests.other_user import python_as

Asked = tuple[str, str, Any]

# Standard library only, so that it starts quickly.
_PROGRAM = """
import http.client, json, socket, sys
port, path, calls = json.loads(sys.argv[1])
answers = []
for method, target, headers, body in calls:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    if path:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(path)
    connection.request(method, target, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    answers.append([answer.status, dict((k.lower(), v) for k, v in answer.getheaders()), answer.read().decode()])
    connection.close()
print(json.dumps(answers))
"""


def ask_as(
    uid: int,
    server: ServerProcess,
    calls: Sequence[Asked],
    *,
    by: Path | None = None,
    headers: dict[str, str] | None = None,
) -> list[Answer]:
    """Make these calls (method, path, body) as this user, each on a connection of its own."""
    sent = [(method, path, headers or {}, body) for method, path, body in calls]
    order = json.dumps([server.port, str(by) if by else None, sent])
    command = python_as(uid, "-c", _PROGRAM, order)
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd="/", timeout=60)
    return [Answer(status, found, body.encode()) for status, found, body in json.loads(done.stdout)]
