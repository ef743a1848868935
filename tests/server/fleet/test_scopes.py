"""A call means the box that was asked; below /fleet it means the whole fleet."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, InventoryGpu, Reading
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.server.app import create_app
from gpu_worker_pool.server.http.pool_route import PoolRoute
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.server.views.lease_view import lease_view
from tests.server.fleet.two_boxes import LEADER, OTHER, two_boxes
from tests.server.running import ROOT

ADMIN = {"Authorization": "Bearer the-secret-of-admin"}
ADA = {"Authorization": "Bearer the-secret-of-ada"}


def ids(leases: list[dict[str, Any]]) -> set[str]:
    return {lease["id"] for lease in leases}


def examples() -> list[dict[str, Any]]:
    """What docs/how-to/fleet-calls.md shows of a fleet."""
    text = (ROOT / "docs/how-to/fleet-calls.md").read_text("utf-8")
    found = re.findall(r'```json held-by="tests/server/fleet/test_scopes.py"\n(.*?)```', text, re.DOTALL)
    return [json.loads(each) for each in found]


def assert_same_keys(shown: object, answered: object) -> None:
    """Every key that the document shows is in the answer."""
    if isinstance(shown, dict) and isinstance(answered, dict):
        assert shown.keys() <= answered.keys()
        for key, value in shown.items():
            assert_same_keys(value, answered[key])
    elif isinstance(shown, list) and isinstance(answered, list):
        assert len(answered) >= len(shown)
        for one, other in zip(shown, answered, strict=False):
            assert_same_keys(one, other)


def test_every_call_that_the_leader_answers_exists_for_the_fleet_too() -> None:
    app = create_app(ServerSettings(_env_file=None, simulated_gpus="1", gpu_pool_fleet="http://gpu-01:8000"))
    routes = [route for route in app.routes if isinstance(route, PoolRoute) and route.include_in_schema]
    for_fleet = {(route.declared.method, route.path_format) for route in routes if route.declared.is_fleet}
    own = [route for route in routes if not route.declared.is_fleet]
    twice = {
        (route.declared.method, f"/fleet{route.path_format}") for route in own if route.declared.answered_by != "box"
    }
    assert twice < for_fleet
    assert {path for _, path in for_fleet - twice} == {"/fleet", "/fleet/nodes/{node}"}
    answered_here = {route.path_format for route in own if route.declared.answered_by == "box"}
    assert answered_here >= {"/gpu/stats", "/health", "/livez", "/readyz", "/config", "/metrics", "/ui", "/ui/{file}"}


async def test_lists_and_views_are_those_of_the_box_or_of_the_fleet(tmp_path: Path) -> None:
    async with two_boxes(tmp_path) as boxes:
        await boxes.read_the_other()
        leader, other = boxes.leader, boxes.other
        assert (await leader.ask("/leases/here", "PUT", {}))[1]["gpus"][0]["node"] == LEADER
        assert (await other.ask("/leases/there", "PUT", {}))[1]["gpus"][0]["node"] == OTHER
        # What does not fit on a box waits there or is refused, though the fleet has room.
        status, problem = await other.ask("/leases/wide", "PUT", {"gpus": 3})
        assert (status, "this box has 2 GPUs" in problem["detail"]) == (422, True)
        status, problem = await other.ask("/leases/gang", "PUT", {"nodes": 2})
        assert (status, "/fleet/leases" in problem["detail"]) == (422, True)
        status, gang = await other.ask("/fleet/leases/gang", "PUT", {"nodes": 2})
        assert status == 201
        assert [(part["node"], len(part["gpus"])) for part in gang["nodes"]] == [(LEADER, 1), (OTHER, 1)]
        assert gang["env"] == gang["nodes"][1]["env"], "of the box that was asked"
        assert (await leader.ask("/leases/gang"))[1]["env"] == gang["nodes"][0]["env"]
        assert gang["wishes"]["nodes"] == 2
        assert_same_keys(examples()[1], gang)
        for box, node, shown in ((leader, LEADER, "here"), (other, OTHER, "there")):
            pool = (await box.ask("/pool"))[1]
            assert (pool["node"], {gpu["node"] for gpu in pool["gpus"]}) == (node, {node})
            assert ids(pool["leases"]) == ids((await box.ask("/leases"))[1]["leases"]) == {shown, "gang"}
            whole = (await box.ask("/fleet/pool"))[1]
            assert (whole["node"], {gpu["node"] for gpu in whole["gpus"]}) == (None, {LEADER, OTHER})
            assert ids((await box.ask("/fleet/leases"))[1]["leases"]) == {"here", "there", "gang"}
            usage = (await box.ask("/usage"))[1]
            assert (usage["node"], usage["total"]["leases"]) == (node, 2)
            assert (await box.ask("/fleet/usage"))[1]["total"]["leases"] == 3
            assert len((await box.ask("/timeline"))[1]["gpus"]) == 2
            assert {gpu["node"] for gpu in (await box.ask("/fleet/timeline"))[1]["gpus"]} == {LEADER, OTHER}
            page = (await box.ask("/ui/data/pool"))[1]
            assert page["pool"]["node"] == node
            assert {event["lease_id"] for event in page["happened"]} == {shown, "gang"}
            assert len((await box.ask("/fleet/ui/data/pool"))[1]["happened"]) == 3
            assert (await box.ask("/fleet/quotas"))[1]["node"] is None


async def test_an_operator_names_a_gpu_of_the_box_or_of_a_node(tmp_path: Path) -> None:
    async with two_boxes(tmp_path) as boxes:
        await boxes.read_the_other()
        leader, other = boxes.leader, boxes.other
        _, gpu = await other.ask("/admin/gpus/0/drain", "POST", {}, ADMIN)
        assert (gpu["node"], gpu["state"]) == (OTHER, "out_of_service")
        _, gpu = await other.ask(f"/fleet/admin/gpus/{LEADER}:1/drain", "POST", {}, ADMIN)
        assert (gpu["node"], gpu["gpu_id"]) == (LEADER, 1)
        assert (await leader.ask("/fleet/admin/gpus/0/drain", "POST", {}, ADMIN))[0] == 404
        assert (await leader.ask("/fleet/admin/gpus/gone:0/drain", "POST", {}, ADMIN))[0] == 404
        booked = {"starts_at": "2100-01-01T00:00:00Z", "ends_at": "2100-01-02T00:00:00Z"}
        _, booking = await other.ask("/bookings/course", "PUT", booked, ADMIN)
        assert {gpu["node"] for gpu in booking["gpus"]} == {OTHER}
        assert (await leader.ask("/bookings"))[1]["bookings"] == []
        assert len((await leader.ask("/fleet/bookings"))[1]["bookings"]) == 1


async def test_the_fleet_is_shown_by_every_box(tmp_path: Path) -> None:
    async with two_boxes(tmp_path) as boxes:
        await boxes.read_the_other()
        assert (await boxes.other.ask("/leases/there", "PUT", {}))[0] == 201
        _, fleet = await boxes.other.ask("/fleet")
        first, second = fleet["boxes"]
        assert (first["node"], first["state"], first["is_leader"], first["gpus"], first["leases"]) == (
            LEADER,
            "up",
            True,
            2,
            0,
        )
        assert (second["node"], second["state"], second["is_leader"], second["leases"]) == (OTHER, "unknown", False, 1)
        assert second["heard_ago_s"] >= 5.0
        assert fleet.keys() == examples()[0].keys()
        assert_same_keys(examples()[0], fleet)


async def test_events_are_those_of_the_box(tmp_path: Path) -> None:
    async with two_boxes(tmp_path) as boxes:
        await boxes.read_the_other()
        leader, other = boxes.leader, boxes.other
        async with other.answering("/events") as (_, of_box):
            await of_box.read(65536)
            assert (await leader.ask("/leases/here", "PUT", {}))[0] == 201
            assert (await other.ask("/leases/there", "PUT", {}))[0] == 201
            told = b""
            while b"lease_granted" not in told:
                told += await of_box.read(65536)
            assert b'"lease_id":"there"' in told
            assert b'"lease_id":"here"' not in told


async def test_a_lease_is_renewed_at_the_box_that_keeps_it(tmp_path: Path) -> None:
    async with two_boxes(tmp_path) as boxes:
        await boxes.read_the_other()
        leader, other = boxes.leader, boxes.other
        for name in ("here", "here-too"):
            assert (await leader.ask(f"/leases/{name}", "PUT", {}))[0] == 201
        assert (await other.ask("/leases/there", "PUT", {}))[0] == 201
        assert (await other.ask("/leases/there-too", "PUT", {}))[0] == 201
        assert (await other.ask("/leases/waits", "PUT", {}))[0] == 202
        owner = leader.app.pool.state.leases["here"].request.holder.owner
        leader.membership.kept = dict.fromkeys(("here", "here-too"), owner)
        other.membership.kept = dict.fromkeys(("there", "there-too"), owner)
        wanted = ["here", "there", "waits", "unheard-of"]
        for box in (leader, other):
            status, answer = await box.ask("/leases/renew", "POST", {"ids": wanted})
            assert (status, ids(answer["renewed"])) == (200, {"here", "there", "waits"})
            assert answer["lost"] == [{"id": "unheard-of", "reason": "unknown", "by": None, "note": None}]
        # Held until there is news at one of them.
        held = asyncio.ensure_future(other.ask("/leases/renew", "POST", {"ids": ["there", "waits"], "wait_s": 30}))
        status, answer = await held
        assert (status, ids(answer["renewed"])) == (200, {"there", "waits"})
        # Without a leader: what this box keeps, and what is known to be at another box.
        assert (await other.ask("/leases/here"))[0] == 200
        other.membership.leader_url = other.membership.leader = None
        status, answer = await other.ask("/leases/renew", "POST", {"ids": wanted})
        assert (status, ids(answer["renewed"]), answer["lost"]) == (200, {"here", "there"}, [])
        status, _ = await other.ask("/leases/renew", "POST", {"ids": ["waits"]})
        assert status == 503
        assert (await other.ask("/leases/renew", "POST", {"ids": ["there"]}, ADA))[0] == 403


async def test_the_home_page_of_a_box_names_the_fleets_calls(tmp_path: Path) -> None:
    async with two_boxes(tmp_path) as boxes:
        for box in (boxes.leader, boxes.other):
            assert "/fleet" in (await box.ask("/"))[1]["endpoints"]


def test_after_a_take_over_a_gpu_has_its_number_also_before_its_box_is_back() -> None:
    state, installed = PoolState(), (InventoryGpu("GPU-x-0", 3, "NVIDIA A100", 80_000.0),)
    key = GpuKey("x", "GPU-x-0")
    for command in (
        cmd.TakeOver(1, "boot"),
        cmd.AnnounceNode("x", "boot", installed),
        cmd.Observe((Reading(Gpu(key, 3, "NVIDIA A100"), 1.0, 80_000.0, 0.0, 0.0, processes=()),)),
        cmd.RequestLease("a", Request()),
        cmd.TakeOver(2, "another boot"),
    ):
        step(state, command, 1.0)

    view = lease_view(state, state.leases["a"], 2.0)

    assert [(gpu.node, gpu.gpu_id, gpu.name) for gpu in view.gpus] == [("x", 3, "NVIDIA A100")]
