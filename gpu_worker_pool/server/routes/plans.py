"""The calls about what is planned: quotas and their use, the forecast of a request that is made now, bookings (GPUs that are kept
for an owner in a span of time), and groups (owners who share a quota, or go first on some GPUs).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from math import inf

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.bounds import show_span
from gpu_worker_pool.core.model.configured import EVERYBODY_ELSE, Booking, Group, Quota, is_name
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import FULL_WEIGHT
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.core.model.state import OwnerUse
from gpu_worker_pool.core.queue.owners import quota_of
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.host.pauses import LoopShare
from gpu_worker_pool.host.users import members_of
from gpu_worker_pool.ledger.journal import NotWritten
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.encoding import encode
from gpu_worker_pool.server.forms import BookingForm, GroupForm, QuotaForm
from gpu_worker_pool.server.http.access import Denied, may_manage, name_of, owner_for
from gpu_worker_pool.server.http.call import Call
from gpu_worker_pool.server.http.pool_route import ADMIN, WRITER, PoolRouter
from gpu_worker_pool.server.http.response import Refusal
from gpu_worker_pool.server.http.shared_answer import SharedAnswers
from gpu_worker_pool.server.parameters import GpusAsked, LeaseId, ModelAsked, OwnerInPath
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.server.views.pool_view import booking_view, booking_views, forecast_view, group_view, group_views
from gpu_worker_pool.server.views.target import Target
from gpu_worker_pool.wire.plans import (
    BookingList,
    BookingView,
    ForecastView,
    GroupList,
    GroupView,
    QuotaList,
    QuotaView,
)

from .admin import DRAIN_PREFIX

logger = logging.getLogger(__name__)

# A forecast takes a pass over the queue for each size and model.
FORECAST_PACE_S = 0.5
MAX_QUOTAS = 10_000
# Of the owners without a quota, those with the most use are shown.
MOST_OTHERS = 1_000

MAX_GROUPS = 100
# A change of a Unix group counts after this time at most.
RESOLVED_EVERY_S = 60.0
_SPAN = re.compile(r"(?:(?P<node>.+):)?(?P<first>\d{1,5})(?:-(?P<last>\d{1,5}))?")

router = PoolRouter(tags=("leases",), answered_by="leader")


@router.get("/quotas", ignores_query=True, help="Get the quotas of owners, and their use")
async def quotas(call: Call) -> QuotaList:
    """All quotas."""
    return await quota_list(call.pool, call.target)


@router.put(
    "/quotas/{owner:path}",
    caller=ADMIN,
    tags=("leases", "admin"),
    help="PUT: set the quota of an owner, or of all others (*); DELETE: remove it (admin)",
)
async def set_quota(call: Call, owner: OwnerInPath, form: QuotaForm) -> QuotaView:
    """Set the quota of an owner."""
    pool, quota = call.pool, Quota(**asdict(form))
    if owner not in pool.state.quotas and len(pool.state.quotas) >= MAX_QUOTAS:
        raise Refusal(422, f"There are {MAX_QUOTAS} quotas already, which is the limit; remove one of them first.")
    await pool.command(cmd.Configure("quotas", (owner,), quota))
    return _Uses(pool).view(owner, quota)


@router.delete("/quotas/{owner:path}", caller=ADMIN, tags=("leases", "admin"), problems=(404,))
async def remove_quota(call: Call, owner: OwnerInPath) -> QuotaList:
    """Remove the quota of an owner."""
    call.pool.check_leads()
    if owner not in call.pool.state.quotas:
        raise Refusal(404, f"{owner} has no quota; GET /quotas lists all.")
    await call.pool.command(cmd.Configure("quotas", (owner,)))
    return await quotas(call)


async def quota_list(pool: Pool, target: Target) -> QuotaList:
    """All quotas, which are those of the whole fleet, with the use of their owners and of others. It yields to other work in
    between.
    """
    pool.check_is_open()
    await pool.caught_up()
    state, uses, share = pool.state, _Uses(pool), LoopShare()
    listed = sorted(state.quotas.items())
    others = [(owner, quota_of(state, owner)) for owner in uses.most(MOST_OTHERS)]
    shown: list[QuotaView] = []
    for owner, quota in (*listed, *others):
        shown.append(uses.view(owner, quota))
        await share.yield_if_due()
    return QuotaList(
        node=target.name(pool.node),
        server_id=pool.id,
        fair_share=state.settings.fair_share,
        quotas=tuple(shown[: len(listed)]),
        others=tuple(shown[len(listed) :]),
        groups=group_views(state),
    )


class _Uses:
    """The use of all owners at one instant."""

    def __init__(self, pool: Pool) -> None:
        self._state, self._now = pool.state, pool.now()
        self._used = {owner: use.used_at(self._now) for owner, use in self._state.usage.items()}
        self._all_used = sum(self._used.values())
        sharing = {*self._state.usage, *self._state.queue.owners}
        self._weights = {owner: quota_of(self._state, owner).weight for owner in sharing}
        self._all_weights = sum(self._weights.values())

    def most(self, number: int) -> list[str]:
        """The owners without a quota of their own that used most."""
        without = [owner for owner in self._used if owner is not None and owner not in self._state.quotas]
        return sorted(without, key=lambda owner: (-self._used[owner], owner))[:number]

    def view(self, owner: str, quota: Quota) -> QuotaView:
        if owner == EVERYBODY_ELSE:
            return QuotaView(owner=owner, **asdict(quota))
        use = self._state.usage.get(owner, OwnerUse())
        used = self._used.get(owner, 0.0)
        # A newcomer would share with all others.
        all_weights = self._all_weights + (0.0 if owner in self._weights else quota.weight)
        return QuotaView(
            owner=owner,
            **asdict(quota),
            held_gpus=round(use.held / FULL_WEIGHT, 3),
            queued=self._state.queue.length_of(owner),
            used_gpu_hours=round(used / FULL_WEIGHT / 3600, 3),
            share_factor=round(share_factor(used, self._all_used, quota.weight, all_weights), 4),
        )


def share_factor(used: float, all_used: float, weight: float, all_weights: float) -> float:
    """1 for an owner that used nothing, 1/2 for one that used exactly its share, less for one that used more."""
    if all_used <= 0:
        return 1.0
    return float(2.0 ** (-(used / all_used) / (weight / all_weights)))


@router.get(
    "/forecast",
    problems=(422, 503),
    help="Get when a request that is made now would start; ?gpus=2&model=A100",
    response_model=ForecastView,
)
async def forecast(call: Call, gpus: GpusAsked = None, model: ModelAsked = None) -> bytes:
    """When a request that is made now would start."""
    caller = call.caller_or_none()
    owner = None if caller is None else caller.name
    pool, target = call.pool, call.target

    async def work_out() -> bytes:
        return encode(await forecast_view(pool, target, gpus=gpus, model=model, owner=owner))

    query = ("forecast", target, gpus, model, owner)
    return await call.part(SharedAnswers).get(query, work_out, FORECAST_PACE_S)


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


# --- groups ----------------------------------------------------------------------------------------------------------


@router.get("/groups", ignores_query=True, help="Get the groups of owners")
async def groups(call: Call) -> GroupList:
    """All groups."""
    pool = call.pool
    pool.check_is_open()
    await pool.caught_up()
    return GroupList(node=call.target.name(pool.node), server_id=pool.id, groups=group_views(pool.state))


@router.put(
    "/groups/{name:path}",
    caller=ADMIN,
    tags=("leases", "admin"),
    help="PUT: let owners share a quota, or go first on GPUs; DELETE: remove the group (admin)",
)
async def set_group(call: Call, name: str, form: GroupForm) -> GroupView:
    """Set a group. It replaces the one before."""
    pool = call.pool
    if not is_name(name):
        raise Refusal(422, "The name of a group must be 1 to 64 letters, digits or signs (. _ @ -).")
    pool.check_leads()
    if name not in pool.state.groups and len(pool.state.groups) >= MAX_GROUPS:
        raise Refusal(422, f"There are {MAX_GROUPS} groups already, which is the limit; remove one of them first.")
    members, unknown = await asyncio.to_thread(members_of, form.members)
    if missing := [each for each in unknown if each.startswith("@")]:
        raise Refusal(422, f"There is no Unix group {missing[0][1:]} on the server's machine; nothing was changed.")
    keys = tuple(dict.fromkeys(key for text in form.first_right for key in _gpus_named(pool, text)))
    group = Group(form.members, tuple(members), form.quota, keys)
    for event in await pool.command(cmd.Configure("groups", (name,), group)):
        if isinstance(event, ev.Refused):
            raise Refusal(422, f"The group {name} was not set: {event.why}.")
    known = {token.name for token in pool.state.tokens.values()} | {*pool.state.usage, *pool.state.queue.owners}
    strangers = [each for each in unknown if each not in known]
    warning = f"neither users of the server's machine nor known here: {', '.join(strangers)}" if strangers else None
    return replace(group_view(pool.state, name, group), warning=warning)


@router.delete("/groups/{name:path}", caller=ADMIN, tags=("leases", "admin"), problems=(404,))
async def remove_group(call: Call, name: str) -> GroupList:
    """Remove a group."""
    call.pool.check_leads()
    if name not in call.pool.state.groups:
        raise Refusal(404, f"There is no group {name}; GET /groups lists all.")
    await call.pool.command(cmd.Configure("groups", (name,)))
    return await groups(call)


async def follow_unix_groups(pool: Pool) -> None:
    """Find out again and again who is in the Unix groups that groups name. The directory may be slow, so a thread asks it."""
    while True:
        await asyncio.sleep(RESOLVED_EVERY_S)
        if pool.trouble is not None:
            continue
        for name, group in list(pool.state.groups.items()):
            members, _ = await asyncio.to_thread(members_of, group.named)
            if members and tuple(members) != group.members and pool.state.groups.get(name) is group:
                logger.info("the members of group %s are now %s", name, ", ".join(members))
                try:
                    await pool.command(cmd.Configure("groups", (name,), replace(group, members=tuple(members))))
                except NotWritten as error:
                    logger.warning("the members of group %s could not be written: %s", name, error)


def _gpus_named(pool: Pool, text: str) -> Sequence[GpuKey]:
    """The GPUs that a text names: `box1:4-7`, `box1`, `4-7`, or a UUID. Without a box they are those of this one."""
    found = list(_matching(pool, text))
    if not found:
        raise Refusal(422, f"No GPU here is called {text!r}; name GPUs as box1:4-7, box1 (all of it), 4-7, or by UUID.")
    return found


def _matching(pool: Pool, text: str) -> Iterator[GpuKey]:
    span = _SPAN.fullmatch(text)
    for slot in pool.state.slots.values():
        key, gpu = slot.key, slot.gpu
        if span is None:
            if text in {key.node, key.uuid}:
                yield key
        elif gpu is not None and (span["node"] or pool.node) == key.node:
            first = int(span["first"])
            if first <= gpu.index <= int(span["last"] or first):
                yield key
