"""The calls that request, show, renew and release leases."""

from __future__ import annotations

from functools import lru_cache, partial
from math import floor
from typing import Any

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease, Lease, QueuedLease
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.core.queue.owners import quota_of
from gpu_worker_pool.server.http.access import Caller, Denied, may_manage, name_of, owner_for
from gpu_worker_pool.server.http.call import Call, Handlers
from gpu_worker_pool.server.http.loop_share import LoopShare
from gpu_worker_pool.server.http.problems import RETRY_AFTER, Refusal
from gpu_worker_pool.server.http.response import Response, encode, encode_with
from gpu_worker_pool.server.http.scope import Scope
from gpu_worker_pool.server.http.shared_answer import SharedAnswers
from gpu_worker_pool.server.http.tokens import Tokens
from gpu_worker_pool.wire.forms import LeaseForm, RenewForm
from gpu_worker_pool.wire.leases import LeaseList, NotRenewed, RenewAnswer, Renewed
from gpu_worker_pool.wire.routes import DEVICES, HOLDER, LEASES, QUEUE, REASON, WAIT_S
from gpu_worker_pool.wire.strict import check_lease_id, parse_form

from .lease_answers import LeaseAnswers
from .lease_view import lease_view, left_s, set_aside_view, warning_view
from .pool_view import PoolFrames, encode_pool
from .renewals import FleetRenewals
from .scoped import live_leases

# So long a call waits for the word of the boxes that have the GPUs of a grant.
CONFIRM_S = 5.0
# A longer form is read each time, so that those that are remembered stay small.
MOST_REMEMBERED_BYTES = 1024


class LeaseCalls:
    def __init__(self, frames: PoolFrames, tokens: Tokens, fleet_renewals: FleetRenewals | None = None) -> None:
        self._frames = frames
        self._pool = frames.pool
        self._fleet_renewals = fleet_renewals
        self._tokens = tokens
        self._answers = LeaseAnswers()
        self._shared = SharedAnswers()
        self.stop = self._shared.stop
        self.close = self._shared.close

    def handlers(self) -> Handlers:
        return {
            "request_lease": self.request,
            "show_lease": self.show,
            "renew_leases": self.renew,
            "release_lease": self.release,
            "list_leases": self.list_leases,
            "show_pool": self.show_pool,
        }

    async def request(self, call: Call) -> Response:
        lease_id, pool = check_lease_id(call.parameters["lease_id"]), self._pool
        caller = call.caller()
        query = call.query(DEVICES)
        body = await call.body()
        form = _lease_form(body)
        if form.nodes > 1 and not call.view_scope.is_fleet:
            raise Refusal(
                422,
                f"nodes is {form.nodes}, and this call means one box; ask a fleet for several nodes at /fleet/leases, or "
                "leave nodes out.",
            )
        owner = owner_for(caller, form.owner, self._tokens)
        try:
            request = _request_of(body, form, owner, call.scope_node)
        except ValueError as error:
            raise Refusal(422, f"{error}.") from None
        known = await pool.find(lease_id)
        if known is not None:
            self._check_may_manage(caller, known)
        else:
            self._check_priority(caller, request)
        events = await pool.request(
            lease_id,
            request,
            caller=call.turn_name(caller),
            is_known=known is not None,
            is_loopback=call.is_loopback,
            uid=None if caller.is_admin else call.uid,
            forwarded=call.forwarded,
            is_admin=caller.is_admin,
        )
        _refuse(lease_id, events)
        is_new = any(isinstance(event, ev.LeaseQueued) and event.lease_id == lease_id for event in events)
        lease = await self._known(lease_id)
        if form.wait_s > 0 and isinstance(lease, QueuedLease) and pool.has_room_to_wait:
            await pool.wait(lease, form.wait_s, call.gone(), renewed_by=call.turn_name(caller))
            if (untaken := self._set_aside(lease_id)) is not None:
                return Response(202 if is_new else 200, untaken)
            lease = await self._known(lease_id)
        lease = await self._told(lease, is_its_client=True)
        status = 200
        if is_new and not isinstance(lease, EndedLease):
            status = 202 if isinstance(lease, QueuedLease) else 201
        return Response(status, self._encode(lease, query, call))

    async def show(self, call: Call) -> Response:
        """The lease as it is, or once it has left the queue within `wait_s`. Its client takes a grant up by this call, if the
        grant was made before it. Else the client is told to call again: an answer to a call that waited may not be read.
        """
        lease_id = check_lease_id(call.parameters["lease_id"])
        query = call.query(WAIT_S, DEVICES)
        lease = await self._known(lease_id)
        # Every caller may read a lease; only a caller that may release it renews it by that.
        caller = call.caller_or_none()
        may_renew = caller is not None and may_manage(caller, lease.request.holder.owner, self._tokens)
        renewed_by = call.turn_name(caller) if caller is not None and may_renew else None
        if renewed_by is not None:
            await self._pool.hear_client(lease_id, caller=renewed_by)
            lease = await self._known(lease_id)
        if isinstance(lease, QueuedLease) and query["wait_s"] > 0:
            await self._pool.wait(lease, query["wait_s"], call.gone(), renewed_by=renewed_by)
            if renewed_by is not None and (untaken := self._set_aside(lease_id)) is not None:
                return Response(200, untaken)
            lease = await self._known(lease_id)
        lease = await self._told(lease, is_its_client=may_renew)
        return Response(200, self._encode(lease, query, call))

    async def renew(self, call: Call) -> Response:
        membership = self._pool.membership
        if membership is not None and self._fleet_renewals is not None:
            return await self._fleet_renewals.renew(call, membership, self._renew_here)
        caller = call.caller()
        call.query()
        body = await call.body()
        return Response(200, encode(await self._renew_here(call, caller, parse_form(RenewForm, body))))

    async def _renew_here(self, call: Call, caller: Caller, form: RenewForm) -> RenewAnswer:
        ids, name = form.ids, call.turn_name(caller)
        state = self._pool.state
        leases = [lease for lease_id in ids if (lease := state.find(lease_id))]
        others = [
            f"{lease.id} (of {lease.request.holder.owner})"
            for lease in leases
            if not may_manage(caller, lease.request.holder.owner, self._tokens)
        ]
        if others:
            raise Denied(
                403,
                f"Only their owner, an operator or an administrator may renew these leases: {', '.join(others[:5])}{_you_are(caller)}.",
            )
        outcome = self._outcome(await self._pool.renew(*ids, caller=name))
        has_news = outcome.lost or _warned(outcome) != set(form.warned) & set(ids)
        if form.wait_s > 0 and not has_news and self._pool.has_room_to_wait_for(len(ids), name):
            outcome = self._outcome(*await self._pool.renew_until_ended(ids, form.wait_s, call.gone(), caller=name))
        return outcome

    async def release(self, call: Call) -> Response:
        lease_id = check_lease_id(call.parameters["lease_id"])
        caller = call.caller()
        query = call.query(HOLDER, REASON)
        await call.no_body()
        lease = await self._known(lease_id)
        self._check_may_manage(caller, lease)
        # An operator that ends the lease of another is named, whatever it says that it is.
        is_holder = query["as"] == "holder" and caller.name in {None, lease.request.holder.owner}
        await self._pool.release(
            lease_id,
            caller=call.turn_name(caller),
            is_holder=is_holder,
            by=name_of(caller),
            why=query["reason"],
        )
        ended = await self._known(lease_id)
        assert isinstance(ended, EndedLease), lease_id  # noqa: S101 - a broken invariant must not go on
        return Response(200, self._answers.ended(self._pool.state, ended.record, self._pool.now()))

    async def list_leases(self, call: Call) -> Response:
        self._pool.check_is_open()
        scope = call.view_scope
        return Response(200, await self._shared.get(("leases", scope), partial(self._encode_list, scope)))

    async def _encode_list(self, scope: Scope) -> bytes:
        pool = self._pool
        await pool.caught_up()
        ids = live_leases(pool.state, scope, pool.now())
        leases = [view async for _, view in self._frames.leases.encode(ids, LoopShare())]
        return encode_with(LeaseList(node=scope.name(pool.node), leases=()), leases=leases)

    async def show_pool(self, call: Call) -> Response:
        asked = call.view_scope, call.lenient_query(QUEUE), call.lenient_query(LEASES)
        return Response(200, await self._shared.get(asked, partial(encode_pool, self._frames, *asked)))

    def _outcome(self, events: list[ev.Event], held_s: float = 0.0) -> RenewAnswer:
        state, now = self._pool.state, self._pool.now()
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
        return RenewAnswer(
            renewed=tuple(renewed), lost=tuple(lost), held_s=_rounded_down(held_s), pool_id=self._pool.pool_id
        )

    def _check_may_manage(self, caller: Caller, lease: Lease) -> None:
        owner = lease.request.holder.owner
        if not may_manage(caller, owner, self._tokens):
            raise Denied(
                403,
                f"The lease {lease.id} belongs to {owner or 'another caller'}; only its owner, an operator or an administrator may change "
                f"it{_you_are(caller)}.",
            )

    def _check_priority(self, caller: Caller, request: Request) -> None:
        """A user may ask for a lower priority than the usual one. A higher one is for an operator to allow."""
        allowed = quota_of(self._pool.state, request.holder.owner).max_priority
        if request.priority > 0 and allowed is None and not caller.is_operator:
            owner = request.holder.owner or "its owner"
            raise Refusal(
                422,
                f"priority is {request.priority}; it must be 0 or less, unless an operator allows {owner} more "
                f"(gpu-pool quota set {request.holder.owner or 'OWNER'} --max-priority {request.priority}).",
            )

    async def _told(self, lease: Lease, *, is_its_client: bool) -> Lease:
        """The lease, once its client may be told. A grant in a fleet is told when its boxes have it; they may end it."""
        confirmed = self._pool.confirmed
        if confirmed is None or not isinstance(lease, ActiveLease):
            return lease
        if not await confirmed(lease.id, CONFIRM_S):
            if is_its_client and self._pool.is_untold(lease.id):
                self._pool.note_not_told(lease.id)
            nodes = ", ".join(dict.fromkeys(key.node for key in lease.gpus))
            raise Refusal(
                503,
                f"The lease {lease.id} is granted on {nodes}, and the box there has not confirmed it yet; ask again with the "
                "same id.",
                RETRY_AFTER,
            )
        if is_its_client:
            self._pool.note_heartbeat(lease.id)
        return await self._known(lease.id)

    def _set_aside(self, lease_id: str) -> bytes | None:
        """The answer to the client of a lease whose GPUs are set aside until it calls again; None if they are not."""
        state = self._pool.state
        lease = state.leases.get(lease_id)
        if lease_id not in state.untaken or not isinstance(lease, ActiveLease):
            return None
        return encode(set_aside_view(state, lease, self._pool.now()))

    async def _known(self, lease_id: str) -> Lease:
        lease = await self._pool.find(lease_id)
        if lease is None:
            raise Refusal(404, f"There is no lease {lease_id}; it may have ended long ago. Request a new one with PUT.")
        return lease

    def _encode(self, lease: Lease, query: dict[str, Any], call: Call) -> bytes:
        pool, state, now = self._pool, self._pool.state, self._pool.now()
        if isinstance(lease, ActiveLease):
            by_uuid, asked = query["devices"] == "uuid", call.node or pool.node
            return self._answers.active(state, lease, now, by_uuid=by_uuid, pool_id=pool.pool_id, asked=asked)
        if isinstance(lease, EndedLease) and not lease.draining:
            return self._answers.ended(state, lease, now)
        starts = pool.expected_starts() if isinstance(lease, QueuedLease) else {}
        return encode(lease_view(state, lease, now, starts=starts))


def to_request(form: LeaseForm, owner: str | None, node: str | None = None) -> Request:
    """The request for the core, with the owner that was proven or accepted, and the only node that it means."""
    return Request(
        wishes=Wishes(
            gpus=form.gpus,
            memory_mb=form.memory_mb,
            model=form.model,
            memory_threshold_percent=form.memory_threshold_percent,
            utilization_threshold_percent=form.utilization_threshold_percent,
            among=form.among,
            nodes=form.nodes,
            node=node,
        ),
        holder=Holder(
            worker_id=form.worker_id,
            owner=owner,
            host=form.host,
            pid=form.pid,
            pid_started=form.pid_started,
            boot_id=form.boot_id,
            pid_namespace=form.pid_namespace,
        ),
        priority=form.priority,
        ttl_s=form.ttl_s,
        # Sorted, so that the same labels make the same request.
        labels=tuple(sorted(form.labels.items())),
        time_limit_s=form.time_limit_s,
        preemptible=form.preemptible,
    )


def _lease_form(body: bytes) -> LeaseForm:
    return _known_form(body) if len(body) <= MOST_REMEMBERED_BYTES else parse_form(LeaseForm, body)


def _request_of(body: bytes, form: LeaseForm, owner: str | None, node: str | None) -> Request:
    is_remembered = len(body) <= MOST_REMEMBERED_BYTES
    return _known_request(body, owner, node) if is_remembered else to_request(form, owner, node)


# A worker asks again and again for the same, with the same bytes. They hold no secret: tokens are in the headers.
@lru_cache(maxsize=256)
def _known_form(body: bytes) -> LeaseForm:
    return parse_form(LeaseForm, body)


@lru_cache(maxsize=256)
def _known_request(body: bytes, owner: str | None, node: str | None) -> Request:
    return to_request(_known_form(body), owner, node)


def _warned(outcome: RenewAnswer) -> set[str]:
    return {renewed.id for renewed in outcome.renewed if renewed.warning is not None}


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


def _rounded_down(seconds: float) -> float:
    """Never too long: a holder counts its TTL from then."""
    return floor(max(seconds, 0.0) * 1000) / 1000


def _you_are(caller: Caller) -> str:
    return "" if caller.name is None else f", and you are {caller.name}"


def _not_renewed(lease_id: str, lease: Lease | None, reason: str) -> NotRenewed:
    if not isinstance(lease, EndedLease):
        return NotRenewed(id=lease_id, reason=reason)
    return NotRenewed(id=lease_id, reason=str(lease.reason), by=lease.by, note=lease.why)
