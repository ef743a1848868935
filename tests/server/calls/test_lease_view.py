"""A lease as callers are shown it."""

from __future__ import annotations

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.server.views.lease_view import left_s
from tests.core.build import request
from tests.core.decider.test_fleet_leases import fleet, on


def test_in_a_fleet_the_leader_says_how_long_a_lease_lasts_at_least() -> None:
    box = fleet()
    box.ask("remote", ttl_s=5)
    box.do(cmd.RequestLease("local", on("x", request(pid=7, among=("GPU-x-1",)))))
    box.pass_time(2)
    assert (left_s(box.state, "remote", box.now), left_s(box.state, "local", box.now)) == (3.0, None)

    box.pass_time(4)
    # Its box has heard its heartbeats, and the leader has not. To its client, null would mean that it needs none.
    assert left_s(box.state, "remote", box.now) == 0.0
    box.do(box.take_over())
    assert left_s(box.state, "remote", box.now) == 0.0
