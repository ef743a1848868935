"""The boxes of a fleet, as its leader knows them."""

from __future__ import annotations

from collections import Counter

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.http.access import name_of
from gpu_worker_pool.server.http.call import Call
from gpu_worker_pool.server.http.pool_route import ADMIN, PoolRouter
from gpu_worker_pool.server.http.response import Refusal
from gpu_worker_pool.server.views.target import nodes_of
from gpu_worker_pool.wire.pool import BoxView, FleetList

# What there is in a fleet only. The calls that mean the whole fleet are the doubles of those that mean this box.
router = PoolRouter(tags=("leases",), answered_by="leader", is_fleet=True)


@router.get(
    "/fleet",
    problems=(422, 503),
    help="The boxes of the fleet; below it the same calls as for this box, for the whole fleet",
)
async def fleet(call: Call) -> FleetList:
    """The boxes of the fleet."""
    pool, view = call.pool, call.pool.fleet()
    pool.check_is_open()
    await pool.caught_up()
    return FleetList(
        id=view.id if view else pool.pool_id,
        epoch=view.epoch if view else None,
        leader=_leader(pool),
        boxes=box_views(pool),
    )


@router.delete("/fleet/nodes/{node:path}", caller=ADMIN, problems=(404, 409), tags=("leases", "admin"))
async def forget_node(call: Call, node: str) -> FleetList:
    """Remove a box that is gone: its leases end."""
    pool = call.pool
    for event in await pool.command(cmd.ForgetNode(node, name_of(call.caller()))):
        if isinstance(event, ev.Refused):
            raise Refusal(404 if node not in pool.state.nodes else 409, f"It is not forgotten: {event.why}.")
    return await fleet(call)


def box_views(pool: Pool) -> tuple[BoxView, ...]:
    """The boxes of the fleet that this server leads."""
    state, now, leader = pool.state, pool.now(), _leader(pool)
    infos = {} if pool.membership is None else pool.membership.box_infos
    gpus = Counter(key.node for key in state.slots)
    leases = Counter(node for lease in state.leases.values() for node in nodes_of(lease))
    return tuple(
        BoxView(
            node=node,
            url=info.url if (info := infos.get(node)) else None,
            state="up" if info and info.is_up else "unknown",
            version=info.version if info else None,
            is_candidate=info.is_candidate if info else None,
            is_leader=node == leader,
            trouble=info.trouble if info else None,
            heard_ago_s=round(max(now - info.heard_at, 0.0), 3) if info else None,
            gpus=gpus[node],
            leases=leases[node],
        )
        for node in sorted({*state.nodes, *infos})
    )


def _leader(pool: Pool) -> str:
    view = pool.fleet()
    return (view and view.leader) or pool.node
