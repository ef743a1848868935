"""Which box of a fleet answers a call, and what the call means there."""

from __future__ import annotations

from typing import Literal

from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.views.target import FLEET, Target

from .call import Call
from .forwarded import HEADER, check_forwarded
from .problems import Refusal


def leader_answers(call: Call, answered_by: Literal["box", "leader", "custodian"], *, is_fleet: bool) -> bool:
    """Whether a call must be passed on to the leader of the fleet. Notes what it means, and the box that passed it on."""
    membership = call.part(Pool).membership
    if (said := call.headers.get(HEADER)) is not None:
        call.forwarded = check_forwarded(
            said,
            is_leader=membership is not None and membership.is_leader,
            node_of_key=None if membership is None else membership.node_of_key,
        )
    if membership is None and is_fleet:
        raise Refusal(
            404, "This server belongs to no fleet, so there is nothing below /fleet; leave that out to mean this box."
        )
    if membership is None or answered_by == "box":
        return False
    call.target = FLEET if is_fleet else Target(call.via_box or membership.node)
    if membership.is_leader or call.forwarded is not None:
        return False
    # The leader knows the tokens of the fleet.
    return answered_by == "leader" or ("authorization" in call.headers and call.caller_or_none() is None)
