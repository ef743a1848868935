"""The wall clock jumps by a day in both directions while leases are held and waited for, and nothing comes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.e2e import faked_time
from tests.e2e.worker import call, now

DAY_S = 86400.0


@pytest.mark.skipif(
    faked_time.library() is None,
    reason="libfaketime is not installed, so no wall clock jumps, neither here nor by the nemesis",
)
@pytest.mark.parametrize("off_s", [-DAY_S, DAY_S])
def test_a_jump_of_the_wall_clock_ends_no_lease_and_prolongs_none(off_s: float, tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    faked_time.set_clock(clock, 0.0)
    env = {"SIMULATED_GPUS": "1", "GPU_POOL_STATE_DIR": str(tmp_path / "state"), **faked_time.environment(clock)}
    with ServerProcess(env, command=faked_time.COMMAND) as server:
        assert call(server.port, "PUT", "/leases/holder", {"ttl_s": 1.0}, 30.0)[0] == 201
        before = server.json("/gpu/stats")["timestamp"]
        assert call(server.port, "PUT", "/leases/waiter", {"ttl_s": 30.0}, 30.0)[0] == 202
        faked_time.set_clock(clock, off_s)

        jumped_at = now()
        status, renewed = call(server.port, "POST", "/leases/renew", {"ids": ["holder"]}, 30.0)
        assert status == 200
        assert renewed["lost"] == []
        state = "queued"
        while state == "queued" and now() - jumped_at < 60.0:
            state = call(server.port, "GET", "/leases/waiter?wait_s=10", None, 30.0)[1]["state"]
        waited_s = now() - jumped_at
        assert server.json("/gpu/stats")["timestamp"][:10] != before[:10], "the clock did not jump"
        assert server.process is not None
        faked_time.bury(server.process.pid)  # it has no use for it any more
    assert state == "active"
    assert waited_s > 0.9  # the holder's TTL, and neither a day nor nothing
