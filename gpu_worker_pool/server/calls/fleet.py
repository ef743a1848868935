"""The boxes of a fleet, as its leader knows them."""

from __future__ import annotations

from collections import Counter

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.http.access import name_of
from gpu_worker_pool.server.http.call import Call, Handlers
from gpu_worker_pool.server.http.problems import Refusal
from gpu_worker_pool.server.http.response import Response, encode
from gpu_worker_pool.wire.fleet import BoxView, FleetList

from .admin import check_admin
from .scoped import nodes_of


class FleetCalls:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def handlers(self) -> Handlers:
        return {"fleet": self.show, "forget_node": self.forget}

    async def forget(self, call: Call) -> Response:
        """Remove a box that is gone for good."""
        await check_admin(call)
        for event in await self._pool.command(cmd.ForgetNode(call.parameters["node"], name_of(call.caller()))):
            if isinstance(event, ev.Refused):
                status = 404 if call.parameters["node"] not in self._pool.state.nodes else 409
                raise Refusal(status, f"It is not forgotten: {event.why}.")
        return await self._show()

    async def show(self, call: Call) -> Response:
        call.query()
        return await self._show()

    async def _show(self) -> Response:
        pool, view = self._pool, self._pool.fleet()
        pool.check_is_open()
        await pool.caught_up()
        shown = FleetList(
            id=view.id if view else pool.pool_id,
            epoch=view.epoch if view else None,
            leader=_leader(pool),
            boxes=box_views(pool),
        )
        return Response(200, encode(shown))


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
            heard_ago_s=round(max(now - info.heard_at, 0.0), 3) if info else None,
            gpus=gpus[node],
            leases=leases[node],
        )
        for node in sorted({*state.nodes, *infos})
    )


def _leader(pool: Pool) -> str:
    view = pool.fleet()
    return (view and view.leader) or pool.node
