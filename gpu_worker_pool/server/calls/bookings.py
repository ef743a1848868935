"""The calls about bookings: GPUs that are kept for an owner in a span of time."""

from __future__ import annotations

from math import inf

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.bounds import show_span
from gpu_worker_pool.core.model.configured import Booking
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.queue.owners import quota_of
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.http.access import Caller, Denied, may_manage, name_of, owner_for
from gpu_worker_pool.server.http.call import Call, Handlers
from gpu_worker_pool.server.http.problems import Refusal
from gpu_worker_pool.server.http.response import Response, encode
from gpu_worker_pool.server.http.scope import Scope
from gpu_worker_pool.server.http.tokens import Tokens
from gpu_worker_pool.wire.forms import BookingForm
from gpu_worker_pool.wire.plans import BookingList
from gpu_worker_pool.wire.strict import check_lease_id

from .admin import DRAIN_PREFIX
from .plan_view import booking_view, booking_views
from .times import read_time


class BookingCalls:
    """`ahead_s`: a user may book so far ahead. Until then others use the GPUs only with a
    time limit.
    """

    def __init__(self, pool: Pool, tokens: Tokens, ahead_s: float) -> None:
        self._pool = pool
        self._tokens = tokens
        self._ahead_s = ahead_s

    def handlers(self) -> Handlers:
        return {"bookings": self.show, "book_gpus": self.book, "cancel_booking": self.cancel}

    async def show(self, call: Call) -> Response:
        self._pool.check_is_open()
        await self._pool.caught_up()
        return self._list(call.view_scope)

    async def book(self, call: Call) -> Response:
        booking_id = check_lease_id(call.parameters["booking_id"])
        if booking_id.startswith(DRAIN_PREFIX):
            raise Refusal(422, f"Ids that begin with {DRAIN_PREFIX} are those of planned drains; use another id.")
        caller = call.caller()
        call.query()
        form = await call.form(BookingForm)
        owner = self._owner(caller, form.owner)
        starts_at, ends_at = read_time("starts_at", form.starts_at), read_time("ends_at", form.ends_at)
        if not caller.is_operator:
            self._check_ahead(ends_at or 0.0)
            self._check_quota(booking_id, owner, form.gpus, (starts_at or 0.0, ends_at or 0.0))
        known = self._pool.state.bookings.get(booking_id)
        if known is not None and not may_manage(caller, known.owner, self._tokens):
            raise Denied(403, f"The booking {booking_id} is not yours; use another id.")
        reason = form.reason.strip() or f"booked by {name_of(caller)}"
        booking = Booking(booking_id, (), starts_at or 0.0, ends_at, owner, reason, name_of(caller))
        wishes = Wishes(gpus=form.gpus, model=form.model, among=form.among, node=call.scope_node)
        events = await self._pool.command(cmd.BookGpus(booking, wishes, must_be_free=not caller.is_operator))
        for event in events:
            if isinstance(event, ev.Refused):
                raise Refusal(409 if known is not None else 422, f"This cannot be booked: {event.why}.")
        return Response(200, encode(booking_view(self._pool.state, self._pool.state.bookings[booking_id])))

    async def cancel(self, call: Call) -> Response:
        booking_id = check_lease_id(call.parameters["booking_id"])
        caller = call.caller()
        call.query()
        self._pool.check_leads()
        known = self._pool.state.bookings.get(booking_id)
        if known is None:
            raise Refusal(404, f"There is no booking {booking_id}; it may be over. GET /bookings lists all.")
        if not _may_cancel(caller, known, self._tokens):
            raise Denied(
                403,
                f"The booking {booking_id} is for {known.owner or 'maintenance'}; only an operator, or "
                "the owner, may cancel it.",
            )
        await self._pool.command(cmd.Configure("bookings", (booking_id,)))
        return self._list(call.view_scope)

    def _owner(self, caller: Caller, named: str | None) -> str:
        """For whom it is: an operator may book for every owner, others for themselves."""
        named = (named or "").strip() or None
        if caller.is_operator and named is not None:
            return named
        owner = owner_for(caller, named, self._tokens) or name_of(caller)
        if named is not None and owner != named:
            raise Denied(
                403, f"You are {owner}; only an operator or an administrator may book for {named}. Leave owner out."
            )
        return owner

    def _check_ahead(self, ends_at: float) -> None:
        if ends_at > self._pool.wall_now() + self._ahead_s:
            raise Denied(
                403,
                f"The booking would last until {iso_time(ends_at)}; only an operator or an administrator may book more than "
                f"{show_span(self._ahead_s)} ahead (GPU_POOL_BOOK_AHEAD).",
            )

    def _check_quota(self, booking_id: str, owner: str, gpus: int, span: tuple[float, float]) -> None:
        """A user may book as many GPUs at a time as the quota of the owner has."""
        state, (starts_at, ends_at) = self._pool.state, span
        allowed = quota_of(state, owner).gpus
        others = [
            (booking.starts_at, inf if booking.ends_at is None else booking.ends_at, len(booking.gpus))
            for booking in state.bookings.values()
            if booking.id != booking_id and booking.owner == owner
        ]
        times = [starts_at, *(begins for begins, _, _ in others if starts_at < begins < ends_at)]
        booked = max(sum(number for begins, ends, number in others if begins <= at < ends) for at in times)
        if allowed is None or booked + gpus > allowed:
            has = "has no quota"
            if allowed is not None:
                has = f"has a quota of {allowed} GPUs, of which {booked} are booked at that time"
            raise Denied(
                403,
                f"{owner} {has}; only an operator or an administrator may book more. PUT /quotas/{owner} sets a quota.",
            )

    def _list(self, scope: Scope) -> Response:
        views = booking_views(self._pool.state, scope)
        return Response(200, encode(BookingList(node=scope.name(self._pool.node), bookings=views)))


def _may_cancel(caller: Caller, booking: Booking, tokens: Tokens) -> bool:
    return caller.is_operator or (booking.owner is not None and may_manage(caller, booking.owner, tokens))
