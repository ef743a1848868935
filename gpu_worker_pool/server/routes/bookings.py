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
from gpu_worker_pool.server.forms import BookingForm
from gpu_worker_pool.server.http.access import Denied, may_manage, name_of, owner_for
from gpu_worker_pool.server.http.call import Call
from gpu_worker_pool.server.http.pool_route import WRITER, PoolRouter
from gpu_worker_pool.server.http.problems import Refusal
from gpu_worker_pool.server.parameters import LeaseId
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.server.views.pool_view import booking_view, booking_views
from gpu_worker_pool.wire.plans import BookingList, BookingView

from .admin import DRAIN_PREFIX

router = PoolRouter(tags=("leases",), answered_by="leader")


@router.get("/bookings", ignores_query=True, help="Get the bookings of GPUs")
async def bookings(call: Call) -> BookingList:
    """All bookings."""
    pool = call.pool
    pool.check_is_open()
    await pool.caught_up()
    return BookingList(node=call.target.name(pool.node), bookings=booking_views(pool.state, call.target))


@router.put(
    "/bookings/{booking_id:path}",
    caller=WRITER,
    problems=(409,),
    help="PUT: book GPUs for a span of time; DELETE: cancel the booking",
)
async def book_gpus(call: Call, booking_id: LeaseId, form: BookingForm) -> BookingView:
    """Book GPUs for a span of time."""
    if booking_id.startswith(DRAIN_PREFIX):
        raise Refusal(422, f"Ids that begin with {DRAIN_PREFIX} are those of planned drains; use another id.")
    pool, caller = call.pool, call.caller()
    owner = _owner(call, form.owner)
    if not caller.is_operator:
        _check_ahead(call, form.ends_at)
        _check_quota(pool, booking_id, owner, form)
    known = pool.state.bookings.get(booking_id)
    if known is not None and not may_manage(caller, known.owner, call.rules.tokens):
        raise Denied(403, f"The booking {booking_id} is not yours; use another id.")
    reason = form.reason.strip() or f"booked by {name_of(caller)}"
    booking = Booking(booking_id, (), form.starts_at, form.ends_at, owner, reason, name_of(caller))
    wishes = Wishes(gpus=form.gpus, model=form.model, among=form.among, node=call.target.node)
    for event in await pool.command(cmd.BookGpus(booking, wishes, must_be_free=not caller.is_operator)):
        if isinstance(event, ev.Refused):
            raise Refusal(409 if known is not None else 422, f"This cannot be booked: {event.why}.")
    return booking_view(pool.state, pool.state.bookings[booking_id])


@router.delete("/bookings/{booking_id:path}", caller=WRITER, problems=(404,))
async def cancel_booking(call: Call, booking_id: LeaseId) -> BookingList:
    """Cancel a booking."""
    pool, caller = call.pool, call.caller()
    pool.check_leads()
    known = pool.state.bookings.get(booking_id)
    if known is None:
        raise Refusal(404, f"There is no booking {booking_id}; it may be over. GET /bookings lists all.")
    is_owner = known.owner is not None and may_manage(caller, known.owner, call.rules.tokens)
    if not caller.is_operator and not is_owner:
        raise Denied(
            403,
            f"The booking {booking_id} is for {known.owner or 'maintenance'}; only an operator, or the owner, may cancel it.",
        )
    await pool.command(cmd.Configure("bookings", (booking_id,)))
    return await bookings(call)


def _owner(call: Call, named: str | None) -> str:
    """For whom it is: an operator may book for every owner, others for themselves."""
    caller, named = call.caller(), (named or "").strip() or None
    if caller.is_operator and named is not None:
        return named
    owner = owner_for(caller, named, call.rules.tokens) or name_of(caller)
    if named is not None and owner != named:
        raise Denied(
            403, f"You are {owner}; only an operator or an administrator may book for {named}. Leave owner out."
        )
    return owner


def _check_ahead(call: Call, ends_at: float) -> None:
    """A user may not book far ahead: until then others use the GPUs only with a time limit."""
    ahead_s = call.part(ServerSettings).gpu_pool_book_ahead or inf
    if ends_at > call.pool.wall_now() + ahead_s:
        raise Denied(
            403,
            f"The booking would last until {iso_time(ends_at)}; only an operator or an administrator may book more than "
            f"{show_span(ahead_s)} ahead (GPU_POOL_BOOK_AHEAD).",
        )


def _check_quota(pool: Pool, booking_id: str, owner: str, form: BookingForm) -> None:
    """A user may book as many GPUs at a time as the quota of the owner has."""
    allowed = quota_of(pool.state, owner).gpus
    others = [
        (booking.starts_at, inf if booking.ends_at is None else booking.ends_at, len(booking.gpus))
        for booking in pool.state.bookings.values()
        if booking.id != booking_id and booking.owner == owner
    ]
    times = [form.starts_at, *(begins for begins, _, _ in others if form.starts_at < begins < form.ends_at)]
    booked = max(sum(number for begins, ends, number in others if begins <= at < ends) for at in times)
    if allowed is None or booked + form.gpus > allowed:
        has = "has no quota"
        if allowed is not None:
            has = f"has a quota of {allowed} GPUs, of which {booked} are booked at that time"
        raise Denied(
            403,
            f"{owner} {has}; only an operator or an administrator may book more. PUT /quotas/{owner} sets a quota.",
        )
