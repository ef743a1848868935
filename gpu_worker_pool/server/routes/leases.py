"""The calls that request, show, renew and release leases, and the pool at a glance."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import floor
from typing import Final

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease, Lease, QueuedLease
from gpu_worker_pool.core.model.request import Holder
from gpu_worker_pool.core.queue.owners import quota_of
from gpu_worker_pool.core.queue.wanted import wanted_by
from gpu_worker_pool.host.pauses import LoopShare
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.encoding import encode
from gpu_worker_pool.server.forms import LeaseForm, RenewForm
from gpu_worker_pool.server.http.access import Caller, Denied, may_manage, name_of, owner_for
from gpu_worker_pool.server.http.call import Call
from gpu_worker_pool.server.http.pool_route import WRITER, PoolRouter
from gpu_worker_pool.server.http.response import RETRY_AFTER, Refusal
from gpu_worker_pool.server.http.shared_answer import SharedAnswers
from gpu_worker_pool.server.parameters import AsHolder, Devices, LeaseId, LeasesLimit, QueueLimit, ReasonWords, WaitS
from gpu_worker_pool.server.views.lease_view import (
    lease_view,
    left_s,
    listed_leases,
    outcome_view,
    set_aside_view,
    warning_view,
)
from gpu_worker_pool.server.views.pool_view import pool_view
from gpu_worker_pool.server.views.target import KeptPool, ShownPool, Target
from gpu_worker_pool.wire.leases import AnyLease, LeaseList, LeaseView, NotRenewed, RenewAnswer, Renewed, WantedView
from gpu_worker_pool.wire.pool import PoolView

from .renewals import FleetRenewals

# A call waits this long for the boxes that have the GPUs of a grant to confirm it.
CONFIRM_S: Final = 5.0
ASKED: Final = {200: "The lease exists already", 201: "Granted", 202: "Queued, after up to wait_s"}

router = PoolRouter(tags=("leases",), answered_by="leader")


@router.put(
    "/leases/{lease_id:path}",
    caller=WRITER,
    problems=(409,),
    statuses=ASKED,
    help="PUT: request a GPU; GET: show the lease; DELETE: release it",
)
async def request_lease(call: Call, lease_id: LeaseId, form: LeaseForm, devices: Devices = "index") -> AnyLease:
    """Request GPUs, or repeat the request."""
    pool, caller = call.pool, call.caller()
    if form.nodes > 1 and not call.target.is_fleet:
        raise Refusal(
            422,
            f"nodes is {form.nodes}, and this call means one box; ask a fleet for several nodes at /fleet/leases, or "
            "leave nodes out.",
        )
    holder = form.holder(owner_for(caller, form.owner, call.rules.tokens))
    known = await pool.find(lease_id)
    if known is not None:
        _check_may_manage(call, caller, known)
    else:
        _check_priority(pool, caller, holder.owner, form.priority)
        holder = _with_process(call, holder, is_admin=caller.is_admin)
    try:
        request = form.request(holder, call.target.node)
    except ValueError as error:
        raise Refusal(422, f"{error}.") from None
    events = await pool.request(lease_id, request, caller=call.turn_name(caller))
    _refuse(lease_id, events)
    is_new = lease_id in ev.new_leases(events)
    lease = await _known(pool, lease_id)
    if form.wait_s > 0 and isinstance(lease, QueuedLease) and pool.has_room_to_wait:
        await pool.wait(lease, form.wait_s, call.gone(), renewed_by=call.turn_name(caller))
        if (untaken := _set_aside(pool, lease_id)) is not None:
            call.status = 202 if is_new else 200
            return untaken
        lease = await _known(pool, lease_id)
    lease = await _told(pool, lease, is_its_client=True)
    if is_new and not isinstance(lease, EndedLease):
        call.status = 202 if isinstance(lease, QueuedLease) else 201
    return await _shown(call, lease, devices)


@router.get("/leases/{lease_id:path}/wanted", caller=WRITER, problems=(401, 403, 404, 422, 429, 503))
async def show_wanted(call: Call, lease_id: LeaseId) -> WantedView:
    """Whether a waiter would be served before a new request like this if the lease were released now.

    A holder with many short tasks asks between two of them. A lease that has no GPUs is not wanted.
    """
    pool, caller = call.pool, call.caller()
    lease = await _known(pool, lease_id)
    _check_may_manage(call, caller, lease, "ask who waits for it")
    waiter = wanted_by(pool.state, lease_id, pool.now())
    return WantedView(
        id=lease_id, is_wanted=waiter is not None, by=None if waiter is None else waiter.request.holder.owner
    )


@router.get("/leases/{lease_id:path}", problems=(404, 422, 429, 503))
async def show_lease(call: Call, lease_id: LeaseId, wait_s: WaitS = 0.0, devices: Devices = "index") -> AnyLease:
    """Show the lease as it is, or once it has left the queue within `wait_s`.

    Its client takes a grant up by this call, if the grant was made before it. Else the client is told to call again: an answer
    to a call that waited may not be read.
    """
    pool = call.pool
    lease = await _known(pool, lease_id)
    # Every caller may read a lease; only a caller that may release it renews it by that.
    caller = call.caller_or_none()
    may_renew = caller is not None and may_manage(caller, lease.request.holder.owner, call.rules.tokens)
    renewed_by = call.turn_name(caller) if caller is not None and may_renew else None
    if renewed_by is not None:
        await pool.hear_client(lease_id, caller=renewed_by)
        lease = await _known(pool, lease_id)
    if isinstance(lease, QueuedLease) and wait_s > 0:
        await pool.wait(lease, wait_s, call.gone(), renewed_by=renewed_by)
        if (untaken := _set_aside(pool, lease_id)) is not None:
            return untaken
        lease = await _known(pool, lease_id)
    # Nor is a reader told more that is not known to be its client: it may be, and believe in a grant that is withdrawn later.
    if (untaken := _set_aside(pool, lease_id)) is not None:
        return untaken
    return await _shown(call, await _told(pool, lease, is_its_client=may_renew), devices)


@router.delete("/leases/{lease_id:path}", caller=WRITER, problems=(404,))
async def release_lease(call: Call, lease_id: LeaseId, as_: AsHolder = None, reason: ReasonWords = None) -> AnyLease:
    """Release the lease, or leave the queue."""
    pool, caller = call.pool, call.caller()
    lease = await _known(pool, lease_id)
    _check_may_manage(call, caller, lease)
    # An operator that ends the lease of another is named, whatever it says that it is.
    is_holder = as_ == "holder" and caller.name in {None, lease.request.holder.owner}
    await pool.command(cmd.Release(lease_id, is_holder, name_of(caller), reason), call.turn_name(caller))
    return outcome_view(pool, await _known(pool, lease_id))


@router.post("/leases/renew", caller=WRITER, answered_by="custodian", help="POST: a heartbeat for leases")
async def renew_leases(call: Call, form: RenewForm) -> RenewAnswer:
    """A heartbeat for leases."""
    if (membership := call.pool.membership) is not None:
        return await call.part(FleetRenewals).renew(call, form, membership, renew_here)
    return await renew_here(call, call.caller(), form)


async def renew_here(call: Call, caller: Caller, form: RenewForm) -> RenewAnswer:
    """Renew the leases that this server decides on."""
    pool, ids, name = call.pool, form.ids, call.turn_name(caller)
    leases = [lease for lease_id in ids if (lease := pool.state.find(lease_id))]
    others = [
        f"{lease.id} (of {lease.request.holder.owner})"
        for lease in leases
        if not may_manage(caller, lease.request.holder.owner, call.rules.tokens)
    ]
    if others:
        raise Denied(
            403,
            f"Only their owner, an operator or an administrator may renew these leases: {', '.join(others[:5])}{_you_are(caller)}.",
        )
    outcome = _outcome(pool, await pool.renew(*ids, caller=name))
    warned = {renewed.id for renewed in outcome.renewed if renewed.warning is not None}
    has_news = outcome.lost or warned != set(form.warned) & set(ids)
    if form.wait_s > 0 and not has_news and pool.has_room_to_wait_for(len(ids), name):
        outcome = _outcome(pool, *await pool.renew_until_ended(ids, form.wait_s, call.gone(), caller=name))
    return outcome


@router.get("/leases", ignores_query=True, response_model=LeaseList, help="Get all live leases", is_known_to_box=True)
async def list_leases(call: Call) -> bytes:
    """All live leases."""
    if call.has_no_leader:
        return await _encode_list(_kept(call), call.target)
    call.pool.check_is_open()
    return await call.part(SharedAnswers).get(("leases", call.target), partial(_encode_list, call.pool, call.target))


def _kept(call: Call) -> KeptPool:
    membership = call.pool.membership
    assert membership is not None  # noqa: S101 - it has no leader, so it is in a fleet
    return KeptPool(call.pool, membership)


async def _encode_list(pool: ShownPool, target: Target) -> bytes:
    await pool.caught_up()
    ids = target.live_leases(pool.state, pool.now())
    leases = [view async for _, view in listed_leases(pool, ids, LoopShare())]
    return encode(LeaseList(node=target.name(pool.node), leases=tuple(leases)))


@router.get(
    "/pool",
    ignores_query=True,
    response_model=PoolView,
    problems=(422,),
    help="Get the node at a glance: GPUs, leases, queue",
    is_known_to_box=True,
)
async def show_pool(call: Call, queue: QueueLimit = None, leases: LeasesLimit = None) -> bytes:
    """The node at a glance. A box of a fleet that has no leader shows what it knows by itself."""
    asked = call.target, queue, leases
    if call.has_no_leader:
        return await encode_pool(_kept(call), *asked)
    return await call.part(SharedAnswers).get(asked, partial(encode_pool, call.pool, *asked))


async def encode_pool(pool: ShownPool, target: Target, queue: int | None, leases: int | None) -> bytes:
    return encode(await pool_view(pool, target, queue, leases))


def _outcome(pool: Pool, events: list[ev.Event], held_s: float = 0.0) -> RenewAnswer:
    state, now = pool.state, pool.now()
    renewed: list[Renewed] = []
    lost: list[NotRenewed] = []
    for event in events:
        if isinstance(event, ev.LeasesRenewed):
            for lease_id in event.lease_ids:
                lease = state.leases.get(lease_id)
                if lease is not None and not isinstance(lease, EndedLease):
                    warning = warning_view(state, lease, now)
                    expires_in_s = left_s(state, lease_id, now)
                    renewed.append(Renewed(id=lease_id, expires_in_s=expires_in_s, warning=warning))
                else:  # it ended during the write
                    lost.append(_not_renewed(lease_id, state.find(lease_id), "unknown"))
        elif isinstance(event, ev.Refused) and event.code is ev.RefusalCode.ENDED:
            lost.append(_not_renewed(event.subject, state.find(event.subject), str(event.why)))
        elif isinstance(event, ev.Refused) and event.code is ev.RefusalCode.UNKNOWN_LEASE:
            lost.append(NotRenewed(id=event.subject))
    # Rounded down: a holder counts its TTL from then.
    held_s = floor(max(held_s, 0.0) * 1000) / 1000
    return RenewAnswer(renewed=tuple(renewed), lost=tuple(lost), held_s=held_s, pool_id=pool.pool_id)


def _check_may_manage(call: Call, caller: Caller, lease: Lease, what: str = "change it") -> None:
    owner = lease.request.holder.owner
    if not may_manage(caller, owner, call.rules.tokens):
        raise Denied(
            403,
            f"The lease {lease.id} belongs to {owner or 'another caller'}; only its owner, an operator or an administrator may "
            f"{what}{_you_are(caller)}.",
        )


def _check_priority(pool: Pool, caller: Caller, owner: str | None, priority: int) -> None:
    """A user may ask for a lower priority than the usual one. A higher one is for an operator to allow."""
    if priority > 0 and quota_of(pool.state, owner).max_priority is None and not caller.is_operator:
        raise Refusal(
            422,
            f"priority is {priority}; it must be 0 or less, unless an operator allows {owner or 'its owner'} more "
            f"(gpu-pool quota set {owner or 'OWNER'} --max-priority {priority}).",
        )


def _with_process(call: Call, holder: Holder, *, is_admin: bool) -> Holder:
    """The holder with its process, if that is on the box that was asked: that box has looked it up. NoSuchProcess and
    ForeignProcess as in host/processes.py.
    """
    passed_on = call.forwarded
    if passed_on is None:
        process = call.pool.local_process(holder, uid=call.uid, may_name_any=is_admin)
    else:
        process = passed_on.holder_process(is_admin=is_admin)
    if process is None:
        return holder
    return replace(holder, process=process, node=call.via_box or call.pool.node)


async def _told(pool: Pool, lease: Lease, *, is_its_client: bool) -> Lease:
    """The lease, once its client may be told. A grant in a fleet is told when its boxes have it; they may end it."""
    if pool.confirmed is None or not isinstance(lease, ActiveLease):
        return lease
    if not await pool.confirmed(lease.id, CONFIRM_S):
        if is_its_client:
            pool.note_not_told(lease.id)
        nodes = ", ".join(dict.fromkeys(key.node for key in lease.gpus))
        raise Refusal(
            503,
            f"The lease {lease.id} is granted on {nodes}, and the box there has not confirmed it yet; ask again with the "
            "same id.",
            RETRY_AFTER,
        )
    if is_its_client:
        pool.note_heartbeat(lease.id)
    known = await _known(pool, lease.id)
    # A grant that its box could not keep was withdrawn, and there may be another one since.
    is_another = isinstance(known, ActiveLease) and known.fence != lease.fence
    return await _told(pool, known, is_its_client=is_its_client) if is_another else known


def _set_aside(pool: Pool, lease_id: str) -> LeaseView | None:
    """The answer about a lease whose GPUs are set aside until its client calls again; None if they are not."""
    lease = pool.state.leases.get(lease_id)
    if lease_id not in pool.state.untaken or not isinstance(lease, ActiveLease):
        return None
    return set_aside_view(pool.state, lease, pool.now())


async def _known(pool: Pool, lease_id: str) -> Lease:
    lease = await pool.find(lease_id)
    if lease is None:
        raise Refusal(404, f"There is no lease {lease_id}; it may have ended long ago. Request a new one with PUT.")
    return lease


async def _shown(call: Call, lease: Lease, devices: Devices) -> AnyLease:
    pool = call.pool
    starts = await pool.expected_starts(LoopShare()) if isinstance(lease, QueuedLease) else {}
    by_uuid, asked = devices == "uuid", call.via_box or pool.node
    return lease_view(pool.state, lease, pool.now(), by_uuid=by_uuid, pool_id=pool.pool_id, asked=asked, starts=starts)


def _refuse(lease_id: str, events: list[ev.Event]) -> None:
    for event in events:
        if isinstance(event, ev.Refused) and event.subject == lease_id:
            match event.code:
                case ev.RefusalCode.UNSERVABLE:
                    raise Refusal(422, f"This can never be granted here: {event.why}.")
                case ev.RefusalCode.CONFLICT:
                    raise Refusal(409, f"The lease {lease_id} was requested with other wishes; use a new id.")
                case ev.RefusalCode.OWNERS_QUEUE_FULL | ev.RefusalCode.TOO_MANY_LEASES:
                    raise Refusal(429, f"{event.why}.", RETRY_AFTER)
                case ev.RefusalCode.QUEUE_FULL:
                    raise Refusal(503, f"{event.why}.", RETRY_AFTER)


def _you_are(caller: Caller) -> str:
    return "" if caller.name is None else f", and you are {caller.name}"


def _not_renewed(lease_id: str, lease: Lease | None, reason: str) -> NotRenewed:
    if not isinstance(lease, EndedLease):
        return NotRenewed(id=lease_id, reason=reason)
    return NotRenewed(id=lease_id, reason=str(lease.reason), by=lease.by, note=lease.why)
