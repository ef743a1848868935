"""Which box of a fleet answers a call, and what the call means there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gpu_worker_pool.server.agent.membership import Membership
from gpu_worker_pool.wire.routes import FLEET_PREFIX, Resource

from .call import Call, Handler
from .forwarded import HEADER, check_forwarded
from .problems import Refusal
from .response import Response
from .scope import FLEET, Scope


class FleetRouting:
    """`membership` is None on a server without a fleet; `pass_on` sends a call to the leader."""

    def __init__(
        self,
        membership: Callable[[], Membership | None] = lambda: None,
        pass_on: Callable[[Call], Awaitable[Response]] | None = None,
    ) -> None:
        self._membership = membership
        self._pass_on = pass_on

    async def answer(self, resource: Resource, handler: Handler, call: Call) -> Response:
        membership = self._membership()
        if (said := call.headers.get(HEADER)) is not None:
            call.forwarded = check_forwarded(
                said,
                is_leader=membership is not None and membership.is_leader,
                node_of_key=None if membership is None else membership.node_of_key,
            )
        if membership is None and resource.is_fleet:
            raise Refusal(
                404,
                f"This server belongs to no fleet, so there is nothing below {FLEET_PREFIX}; leave that out to mean this box.",
            )
        if membership is None or resource.answered_by == "box":
            return await handler(call)
        call.view_scope = FLEET if resource.is_fleet else Scope(call.node or membership.node)
        is_ours = membership.is_leader or resource.answered_by == "custodian"
        if is_ours or call.forwarded is not None or self._pass_on is None:
            return await handler(call)
        return await self._pass_on(call)
