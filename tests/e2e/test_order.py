"""Fifty waiters in fifty processes on one GPU are served in the order they asked."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.e2e.crowd import LIMIT_S, serving
from tests.e2e.worker import call
from tests.server.running import ROOT

WAITERS = 50


def test_fifty_waiters_are_served_in_the_order_they_asked() -> None:
    with serving(1) as server:
        status, _ = call(server.port, "PUT", "/leases/first", {"ttl_s": 60.0}, 30.0)
        assert status == 201
        command = [sys.executable, "-S", "-m", "tests.e2e.line", str(server.port), str(WAITERS)]
        with subprocess.Popen(command, cwd=ROOT, env={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as line:
            try:
                assert line.stdin is not None
                assert line.stdout is not None
                waiting = [json.loads(line.stdout.readline()) for _ in range(WAITERS)]
                assert line.stdout.readline() == b"\n"
                assert call(server.port, "DELETE", "/leases/first", None, 30.0)[0] == 200
                line.stdin.close()
                served = [json.loads(text) for text in line.stdout]
                assert line.wait(LIMIT_S) == 0
            finally:
                line.kill()

    assert waiting == [{"waits": number, "status": 202, "position": number + 1} for number in range(WAITERS)]
    assert [told["served"] for told in served] == list(range(WAITERS))
    fences = [told["fence"] for told in served]
    assert fences == sorted(set(fences))
