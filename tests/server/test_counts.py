"""What a lease costs the server, in counts: they are the same on a busy machine, where no time can be held to a limit.

A number that has become smaller is good news: lower it here. One that has become larger makes every lease slower.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from contextlib import closing

import pytest

from benchmarks.leases.locks import PoolLease
from gpu_worker_pool.testing import ServerProcess
from tests.server.counted_server import FILE
from tests.server.leasing import eventually

CYCLES = 40
BOTH = {
    "commits": 1,
    "hand-overs between threads": 1,
    # None of these two: what a call waits for, its commit, has a callback.
    "tasks": 0,
    "messages by uvicorn": 0,
    # The caller's, and the one of the commit.
    "futures": 2,
    # The end of the turn, the flush, the answer, and those that show what happened.
    "callbacks": 4,
    # uvicorn's, which closes a connection that is not used.
    "timers": 1,
    "answers in one write": 1,
    # The journal before the commit, and its log before and after it.
    "files looked at": 3,
    # The high-water mark.
    "files written, without SQLite": 1,
    "files opened": 0,
    "steps of the core": 1,
    "decisions: Tick": 1,
}
AT_MOST: dict[str, dict[str, int]] = {
    "PUT": {**BOTH, "decisions: RequestLease": 1, "decisions: ServeQueue": 2},
    "DELE": {**BOTH, "decisions: Release": 1, "decisions: ServeQueue": 1},
}


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counter[str]]:
    """The counts that most calls of each kind have: a reading of the GPUs may come in between."""
    file = tmp_path_factory.mktemp("counts") / "counts.json"
    command = (sys.executable, "-m", "tests.server.counted_server")
    # As many GPUs as cycles, so that none is drained by a reading before it is needed again; and few readings.
    settings = {"SIMULATED_GPUS": str(CYCLES), "REFRESH_INTERVAL": "60", FILE: str(file)}
    with ServerProcess(settings, command=command) as server, closing(PoolLease(server.port)) as lease:
        for _ in range(CYCLES):
            lease.acquire()
            lease.release()
        os.kill(server.pid, signal.SIGUSR1)
        calls = json.loads(
            eventually(lambda: file.read_text(encoding="utf-8") if file.exists() else None, "the counts")
        )
    most: dict[str, Counter[str]] = {}
    for kind in AT_MOST:
        found = Counter(tuple(sorted(counted.items())) for method, counted in calls[2:-1] if method == kind)
        most[kind] = Counter(dict(found.most_common(1)[0][0]))
    return most


@pytest.mark.parametrize("kind", AT_MOST)
def test_a_lease_call_costs_no_more_than_this(counts: dict[str, Counter[str]], kind: str) -> None:
    known = AT_MOST[kind]
    assert {
        what: (number, known.get(what, 0)) for what, number in counts[kind].items() if number > known.get(what, 0)
    } == {}
