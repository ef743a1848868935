"""Leases and nodes of a fleet: boxes end leases, fall silent, are forgotten, and bring back what the database lost."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from gpu_worker_pool.core.decider.condense import condense
from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.fleet.written_leases import kept_by
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import InventoryGpu
from gpu_worker_pool.core.model.lease import ActiveLease, EndReason, KeptLease, custodian
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.core.model.state import PoolState
from tests.core.build import WALL_OFFSET_S, Box, key, of_kind, reading, refusals, request

NODES = ("x", "y")


class Fleet(Box):
    """A pool of two boxes with two GPUs each."""

    def take_over(self) -> cmd.TakeOver:
        return cmd.TakeOver(self.state.epoch + 1, self.boot_id, 0.0, WALL_OFFSET_S)

    def active(self, lease_id: str) -> ActiveLease:
        lease = self.state.leases[lease_id]
        assert isinstance(lease, ActiveLease)
        return lease

    def kept(self, lease_id: str, node: str = "x") -> KeptLease:
        return kept_by(self.active(lease_id), node)


def fleet(**settings: Any) -> Fleet:
    return Fleet(*(reading(index, node=node) for node in NODES for index in (0, 1)), **settings)


def on(node: str, asked: Request) -> Request:
    return replace(asked, holder=replace(asked.holder, node=node))


def without(box: Fleet, *lease_ids: str) -> Fleet:
    """A fleet whose database has lost all about these leases, after another leader took over."""
    other = Fleet()
    journal = [event for event in box.log if isinstance(event, ev.DurableEvent)]
    other.log = [
        event for event in journal if getattr(event, "lease_id", None) not in lease_ids or not _is_of_grant(event)
    ]
    other.state = replay(PoolState(settings=box.settings), other.log)
    other.now = box.now + 1.0
    other.do(other.take_over())
    return other


def _is_of_grant(event: ev.Event) -> bool:
    return isinstance(event, ev.LeaseQueued | ev.LeaseGranted)


# --- TTL -----------------------------------------------------------------------------------------------------------


def test_a_waiter_of_a_fleet_still_needs_its_heartbeats() -> None:
    box = fleet()
    for number in range(4):
        box.ask(f"holds {number}")
    box.ask("waits", ttl_s=5)
    box.run_to(box.now + 4)
    assert of_kind(box.renew("waits"), ev.LeasesRenewed)
    box.run_to(box.now + 4)
    assert box.stage("waits") == "queued"
    box.run_to(box.now + 2)

    assert box.stage("waits") == "expired"


def test_the_leader_counts_no_heartbeat_of_an_active_lease_and_names_the_box_that_does() -> None:
    box = fleet()
    box.ask("a", among=("GPU-y-1",))

    assert box.renew("a") == [ev.Refused(box.now, ev.RefusalCode.KEPT_BY_BOX, "a", "y")]


def test_the_leader_tells_how_long_a_lease_lasts_at_least() -> None:
    box = fleet()
    box.ask("remote", ttl_s=5)
    box.do(cmd.RequestLease("local", on("x", request(pid=7, among=("GPU-x-1",)))))
    box.pass_time(2)

    assert box.state.expires_at("remote") == box.now + 3
    assert box.state.expires_at("local") is None
    box.do(box.take_over())
    # Its heartbeats are not known; its TTL may have run out before its client was told of it.
    assert box.state.expires_at("remote") == -inf


def test_a_lease_ends_when_its_box_says_that_its_ttl_ran_out() -> None:
    box = fleet()
    box.ask("a", ttl_s=5)
    gpus = box.gpus_of("a")

    (ended, *_) = box.do(cmd.EndLease("a", EndReason.EXPIRED))
    assert isinstance(ended, ev.LeaseEnded)
    assert (ended.reason, ended.draining) == ("expired", gpus)
    assert box.do(cmd.EndLease("a", EndReason.EXPIRED)) == []
    assert box.do(cmd.EndLease("b", EndReason.EXPIRED)) == [ev.Refused(box.now, ev.RefusalCode.UNKNOWN_LEASE, "b")]


@pytest.mark.parametrize(
    ("holder_node", "gpus", "keeper"),
    [
        pytest.param(None, ("y", "x"), "y", id="a remote holder: the first GPU"),
        pytest.param("x", ("y", "x"), "x", id="the holder's own box"),
        pytest.param("z", ("x", "y"), "x", id="a holder whose box has no GPU of it"),
    ],
)
def test_one_box_keeps_the_ttl(holder_node: str | None, gpus: tuple[str, ...], keeper: str) -> None:
    asked = request(pid=7 if holder_node else None)
    asked = asked if holder_node is None else on(holder_node, asked)
    lease = ActiveLease("a", asked, tuple(key(0, node) for node in gpus), 1, 0.0, 0.0, 1000)

    assert custodian(lease) == keeper
    assert [kept_by(lease, node).is_custodian for node in gpus] == [node == keeper for node in gpus]


# --- silence -------------------------------------------------------------------------------------------------------


def test_nothing_is_granted_on_a_silent_node_and_its_leases_go_on() -> None:
    box = fleet()
    box.ask("a", among=("GPU-x-0",), ttl_s=5)
    box.do(cmd.SilenceNode("x"))
    box.ask("b", among=("GPU-x-1",))
    box.pass_time(100)

    assert (box.stage("a"), box.stage("b")) == ("active", "queued")
    assert all(slot.reading is None for gpu, slot in box.state.slots.items() if gpu.node == "x")
    assert box.do(cmd.SilenceNode("x")) == []

    box.observe_now(reading(1, node="x"))
    assert box.stage("b") == "active"


# --- forgetting a node ---------------------------------------------------------------------------------------------


def test_a_node_that_is_there_is_not_forgotten() -> None:
    box = fleet()

    (refused,) = refusals(box.do(cmd.ForgetNode("x", by="root")), ev.RefusalCode.NODE_STAYS)
    assert "connected" in refused.why
    assert refusals(box.do(cmd.ForgetNode("z")), ev.RefusalCode.NODE_STAYS)
    assert "x" in box.state.nodes


def test_a_node_that_is_gone_is_forgotten_with_its_leases() -> None:
    box = fleet()
    box.ask("a", among=("GPU-x-0",))
    box.ask("gang", gpus=1, nodes=2, among=("GPU-x-1", "GPU-y-1"))
    box.ask("left", among=("GPU-y-0",))
    fence = box.fence_of("gang")
    box.do(cmd.SilenceNode("x"))
    box.exclude(key(0, "x"), "broken")
    box.ask("impossible", gpus=2)
    box.do(cmd.Release("impossible"))

    box.do(cmd.ForgetNode("x", by="root"))

    assert [box.stage(name) for name in ("a", "gang", "left")] == ["revoked", "draining", "active"]
    assert set(box.state.nodes) == {"y"}
    assert {gpu.node for gpu in box.state.slots} == {"y"}
    assert not box.state.excluded
    assert box.state.fences["x"] == fence
    ended = box.state.ended["a"]
    assert (ended.by, ended.reason) == ("root", "revoked")
    fresh = replay(PoolState(settings=box.settings), condense(box.state))
    assert (set(fresh.nodes), fresh.fences) == ({"y"}, box.state.fences)


# --- announcements -------------------------------------------------------------------------------------------------


def test_the_machine_of_a_node_is_remembered() -> None:
    box = fleet()
    inventory = (InventoryGpu("GPU-z-0", 0, "A100", 80_000.0),)
    box.do(cmd.AnnounceNode("z", "boot1", inventory, "machine 1"))
    assert box.state.nodes["z"].machine_id == "machine 1"
    assert not of_kind(box.do(cmd.AnnounceNode("z", "boot1", inventory)), ev.NodeJoined)
    box.observe_now(reading(0, node="z", name="another name"))
    assert box.state.nodes["z"].machine_id == "machine 1"

    fresh = replay(PoolState(settings=box.settings), condense(box.state))
    assert fresh.nodes == box.state.nodes


# --- what the database lost ----------------------------------------------------------------------------------------


def test_a_lost_grant_is_brought_back_by_its_box() -> None:
    before = fleet()
    before.do(cmd.RequestLease("a", on("x", request(pid=7, among=("GPU-x-0",), time_limit_s=500))))
    kept = before.kept("a")
    before.pass_time(100)
    box = without(before, "a")
    assert box.state.find("a") is None

    box.do(cmd.RecoverLease(kept, "x"))

    lease = box.active("a")
    assert (lease.gpus, lease.fence, lease.granted_at) == ((key(0, "x"),), kept.fence, kept.granted_at)
    assert lease.limit == pytest.approx(before.active("a").limit)
    assert lease.request.holder.process == kept.request.holder.process
    assert box.do(cmd.RecoverLease(kept, "x")) == []
    box.do(cmd.AnnounceNode("x", "boot1"))
    assert box.state.expires_at("a") is None
    box.observe_now(reading(0, node="x"))
    box.ask("b", among=("GPU-x-0",))
    assert box.stage("b") == "queued"
    box.observe_now(reading(1, node="x"))
    box.ask("c", among=("GPU-x-1",))
    assert box.fence_of("c") > kept.fence
    assert box.state == replay(PoolState(settings=box.settings), box.log)


def test_a_lost_grant_whose_request_is_there_leaves_the_queue() -> None:
    before = fleet()
    before.ask("a", among=("GPU-x-0",))
    kept = before.kept("a")
    box = without(before, "a")
    box.ask("a", among=("GPU-x-0",))
    assert box.stage("a") == "queued"

    box.do(cmd.RecoverLease(kept, "x"))
    assert box.fence_of("a") == kept.fence
    # Its TTL began when it was granted first, whatever has passed since.
    assert box.state.expires_at("a") == -inf


def test_a_lease_that_ended_is_not_brought_back() -> None:
    """The journal may have forgotten it; its fence tells."""
    box = fleet()
    box.ask("a", among=("GPU-x-0",))
    kept = box.kept("a")
    box.release("a")
    box.state.leases.clear()
    assert box.do(cmd.RecoverLease(kept, "x")) == []

    again = fleet(remembered_ended_leases=0, awaits_reading_after_release=False)
    again.ask("a", among=("GPU-x-0",))
    kept = again.kept("a")
    again.release("a")
    assert again.state.find("a") is None
    assert again.do(cmd.RecoverLease(kept, "x")) == []


def test_a_lost_grant_does_not_come_back_on_a_gpu_that_another_lease_holds() -> None:
    box = fleet()
    box.ask("a", among=("GPU-x-0",))
    kept = replace(box.kept("a"), id="other", fence=9)
    assert box.do(cmd.RecoverLease(kept, "x")) == []

    box.release("a")
    assert box.stage("a") == "draining"
    box.do(cmd.RecoverLease(kept, "x"))
    assert box.stage("other") == "active"


def test_a_lost_grant_does_not_come_back_beside_a_later_grant_of_the_same_request() -> None:
    before = fleet()
    before.ask("a")
    kept = before.kept("a")
    box = without(before, "a")
    box.observe_now(reading(0, node="y"))
    box.ask("a")
    assert (box.fence_of("a"), box.gpus_of("a")) == (kept.fence, (key(0, "y"),))

    assert box.do(cmd.RecoverLease(kept, "x")) == []
    assert box.gpus_of("a") == (key(0, "y"),)


def test_each_box_brings_back_its_part_of_a_gang() -> None:
    before = fleet()
    before.ask("gang", nodes=2)
    parts = {node: before.kept("gang", node) for node in NODES}
    box = without(before, "gang")

    for node in NODES:
        box.do(cmd.RecoverLease(parts[node], node))
        box.do(cmd.AnnounceNode(node, "boot1", fence_seen=parts[node].fence))

    lease = box.active("gang")
    assert {gpu.node for gpu in lease.gpus} == set(NODES)
    assert lease.weight == before.active("gang").weight
    assert box.state.fences == dict.fromkeys(NODES, lease.fence)
    assert box.state.usage[None].used == pytest.approx(0.0)
    box.release("gang")
    assert box.stage("gang") == "draining"
    fresh = replay(PoolState(settings=box.settings), condense(box.state))
    assert fresh.leases.keys() == box.state.leases.keys()
