"""`gpu-pool reserve`: GPUs that are kept for an owner for a span of time."""

from __future__ import annotations

import time
import uuid
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import quote

from gpu_worker_pool.cli.declare import Option
from gpu_worker_pool.cli.options import Endpoints, Json, Model
from gpu_worker_pool.cli.output import complain, out, plain, print_body
from gpu_worker_pool.cli.pools.reading import ask_own_pool
from gpu_worker_pool.cli.pools.report import HELD_BACK, PoolReport, is_drain, show_booked_span, show_booking
from gpu_worker_pool.cli.pools.servers import ServerAnswer, Servers, ask_one, call, failure_of, one_server, read_answer
from gpu_worker_pool.cli.table import make_table, print_table
from gpu_worker_pool.cli.units import parse_duration_s, parse_moment
from gpu_worker_pool.failure import REFUSED, USAGE, Failure
from gpu_worker_pool.wire.plans import BookingView

# Neither the leases nor the queue matter here.
_QUERY = "?queue=0&leases=0"
# Of these, the last may have been done all the same.
_UNSURE = {None, HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.GATEWAY_TIMEOUT}


def reserve(
    endpoint: Endpoints = None,
    *,
    at: Annotated[
        str | None,
        Option(
            "--at",
            metavar="TIME",
            help="When it begins: '2026-12-01 09:00' (local time), 09:00, or 2h from now. By default now.",
        ),
    ] = None,
    for_: Annotated[float | None, Option("--for", parser=parse_duration_s, metavar="4h", help="For how long.")] = None,
    gpus: Annotated[
        int | None,
        Option("--gpus", "-g", min=1, max=1024, help="How many GPUs, all in one machine. [1]"),
    ] = None,
    owner: Annotated[
        str | None,
        Option("--owner", metavar="NAME", help="For whom; by default you. Only administrators book for others."),
    ] = None,
    model: Model = None,
    gpu: Annotated[
        list[str] | None,
        Option("--gpu", metavar="GPU", help="This GPU, as `status` shows it; repeat it for more."),
    ] = None,
    reason: Annotated[str, Option("--reason", help="The reason, which every user can see.")] = "",
    cancel: Annotated[
        str | None, Option("--cancel", metavar="ID", help="Cancel this booking, and book nothing.")
    ] = None,
    json: Json = False,
) -> None:
    """Book GPUs for an owner and a time. Without options, list bookings and planned drains.

    Others may use the GPUs until then. Administrators may book for any owner; other users for themselves, as many GPUs as
    their quota has. The owner asks for them as for any GPU: gpu-pool run. In a fleet, GPUs of any box are booked.
    """
    now = time.time()
    is_bare = all(given is None for given in (at, for_, gpus, owner, model, gpu)) and not reason
    if cancel is not None:
        if not is_bare:
            raise Failure("--cancel books nothing; leave the other options out", USAGE)
        said, answer = one_server(endpoint, is_fleet=True).run(lambda opened: _cancel(opened, cancel, now))
        print_body(answer.data) if json else out().print(f"cancelled: {said}")
    elif is_bare:
        _list(endpoint, now, json=json)
    elif for_ is None:
        raise Failure("say for how long, as in --for 4h", USAGE)
    else:
        starts_at = now if at is None else parse_moment(at, now, "--at")
        ends_at = starts_at + for_
        if ends_at <= max(starts_at, now):
            raise Failure("it would end before now; give a later time", USAGE)
        form: dict[str, Any] = {"starts_at": f"{starts_at:.3f}", "ends_at": f"{ends_at:.3f}"}
        form |= {"gpus": gpus or len(gpu or ()) or 1, "model": model, "owner": owner, "reason": reason}
        report, answer = one_server(endpoint, is_fleet=True).run(lambda opened: _book(opened, form, gpu or []))
        booked = read_answer(BookingView, answer)
        print_body(answer.data) if json else out().print(_show(report, booked, now))
        if starts_at > now:
            complain(HELD_BACK)
        if booked.late_holders:
            late = ", ".join(booked.late_holders)
            complain(f"{late} may still hold some of these GPUs then; a booking ends no lease")


def _show(report: PoolReport, booking: BookingView, now: float) -> str:
    return f"{report.naming.show(booking.gpus)} {show_booking(booking, now)} ({booking.id})"


def _list(endpoint: list[str] | None, now: float, *, json: bool) -> None:
    """Show bookings and planned drains: which GPUs, for whom, when, and why."""
    if json:
        print_body(ask_one(endpoint, "/bookings", what="the bookings cannot be listed", is_fleet=True).data)
        return
    report = one_server(endpoint, is_fleet=True).run(lambda opened: ask_own_pool(opened, _QUERY))
    if not report.view.bookings:
        complain("nothing is booked, and no drain is planned")
        return
    table = make_table("ID", "GPUS", "FOR", "WHEN", "REASON", "BOOKED BY", whole=("GPUS",))
    for booking in report.view.bookings:
        table.add_row(
            booking.id,
            ", ".join(map(report.naming.id_of, booking.gpus)),
            "maintenance" if is_drain(booking) else booking.owner or "nobody",
            show_booked_span(booking, now),
            booking.reason,
            booking.booked_by or "-",
        )
    print_table(out(), table)


async def _book(servers: Servers, form: dict[str, Any], gpus: list[str]) -> tuple[PoolReport, ServerAnswer]:
    report = await ask_own_pool(servers, _QUERY)
    # In a fleet `gpu-01:2` is a name for people; servers know its UUID.
    known = {report.naming.id_of(gpu): gpu.uuid for gpu in report.view.gpus if gpu.uuid}
    if strange := [name for name in gpus if ":" in name and name not in known]:
        raise Failure(f"{strange[0]!r} is not a GPU of {report.endpoint}; `gpu-pool status` shows all", USAGE)
    body = form | ({"among": [known.get(name, name) for name in gpus]} if gpus else {})
    answer = await servers.ask(servers.ids[0], _path(f"booking-{uuid.uuid4().hex[:8]}"), "PUT", body)
    if answer.status in _UNSURE:
        why = plain(answer.error).rstrip(".")
        raise Failure(f"it may or may not be booked: {why}; `gpu-pool reserve` lists what is booked")
    if not answer.is_ok:
        raise failure_of(answer, f"nothing was booked: {plain(answer.error)}")
    return report, answer


async def _cancel(servers: Servers, text: str, now: float) -> tuple[str, ServerAnswer]:
    """Cancel the booking with this id, or the only one whose id begins so; in words."""
    report = await ask_own_pool(servers, _QUERY)
    found = [booking for booking in report.view.bookings if booking.id == text]
    found = found or [booking for booking in report.view.bookings if text and booking.id.startswith(text)]
    if len(found) != 1:
        what = f"{len(found)} bookings begin with" if found else "there is no booking"
        raise Failure(f"{what} {plain(text)}; `gpu-pool reserve` lists all", REFUSED)
    answer = await call(servers, _path(found[0].id), "DELETE", what=f"{found[0].id} was not cancelled")
    return _show(report, found[0], now), answer


def _path(booking_id: str) -> str:
    return f"/bookings/{quote(booking_id, safe='')}"
