"""`gpu-pool reserve` and `reservations`: GPUs that are kept for an owner for a span of time."""

from __future__ import annotations

import time
import uuid
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import quote

from gpu_worker_pool.cli.declare import Option
from gpu_worker_pool.cli.options import Endpoints, FleetScope, Json, Model
from gpu_worker_pool.cli.output import complain, out, plain, print_body
from gpu_worker_pool.cli.pools.plans import HELD_BACK, BookingReport, show_plan
from gpu_worker_pool.cli.pools.reading import ask_pool
from gpu_worker_pool.cli.pools.report import PoolReport, check_any_is_up
from gpu_worker_pool.cli.pools.servers import ServerAnswer, Servers, call, failure_of, one_server
from gpu_worker_pool.cli.table import make_table, print_table
from gpu_worker_pool.cli.units import parse_duration_s, parse_moment
from gpu_worker_pool.failure import REFUSED, USAGE, Failure
from gpu_worker_pool.wire.plans import BookingView
from gpu_worker_pool.wire.reader import read

# Neither the leases nor the queue matter here.
_QUERY = "?queue=0&leases=0"


def reserve(
    endpoint: Endpoints = None,
    *,
    at: Annotated[
        str | None,
        Option(
            "--at",
            metavar="TIME",
            help="The beginning: '2026-12-01 09:00' of your time zone, 09:00, or 2h from now. By default now.",
        ),
    ] = None,
    for_: Annotated[float | None, Option("--for", parser=parse_duration_s, metavar="4h", help="For how long.")] = None,
    until: Annotated[str | None, Option("--until", metavar="TIME", help="Until when, instead of --for.")] = None,
    gpus: Annotated[
        int | None,
        Option("--gpus", "-g", min=1, max=1024, help="How many GPUs, all in one machine. [1]"),
    ] = None,
    owner: Annotated[
        str | None,
        Option("--owner", metavar="NAME", help="For whom; by default for you. For others: administrators only."),
    ] = None,
    model: Model = None,
    gpu: Annotated[
        list[str] | None,
        Option("--gpu", metavar="GPU", help="This GPU, as `status` shows it; repeat it for more."),
    ] = None,
    reason: Annotated[str, Option("--reason", help="Why; every user is shown it.")] = "",
    id_: Annotated[
        str | None,
        Option("--id", metavar="ID", help="The id of the booking; a known one is changed."),
    ] = None,
    cancel: Annotated[
        str | None, Option("--cancel", metavar="ID", help="Cancel this booking, and book nothing.")
    ] = None,
    fleet: FleetScope = False,
    json: Json = False,
) -> None:
    """Book GPUs for an owner and a time. Others may use them until then.

    Administrators may book for any owner; others for themselves, as many GPUs as their quota has. The owner asks for them
    as for any GPU: gpu-pool run.
    """
    now = time.time()
    servers = one_server(endpoint, is_fleet=fleet)
    if cancel is not None:
        if any(given is not None for given in (at, for_, until, gpus, owner, model, gpu, id_)):
            raise Failure("--cancel books nothing; leave the other options out", USAGE)
        cancelled, answered = servers.run(lambda opened: _cancel(opened, cancel))
        if json:
            print_body(answered)
        else:
            out().print(f"cancelled: {show_plan(cancelled, now)} ({cancelled.id})")
        return
    if (for_ is None) == (until is None):
        raise Failure("say how long: give --for 4h or --until '2026-12-01 13:00', and not both", USAGE)
    starts_at = now if at is None else parse_moment(at, now, "--at")
    ends_at = starts_at + (for_ or 0.0) if until is None else parse_moment(until, starts_at, "--until")
    if ends_at <= max(starts_at, now):
        raise Failure("it would be over before it begins; give a later end", USAGE)
    form: dict[str, Any] = {"starts_at": f"{starts_at:.3f}", "ends_at": f"{ends_at:.3f}"}
    form |= {"gpus": gpus or len(gpu or ()) or 1, "model": model, "owner": owner, "reason": reason}
    booking_id = id_ or f"booking-{uuid.uuid4().hex[:8]}"
    booked, answered = servers.run(lambda opened: _book(opened, booking_id, form, gpu or []))
    if json:
        print_body(answered)
        return
    out().print(f"{show_plan(booked, now)} ({booked.id})")
    if starts_at > now:
        complain(HELD_BACK)
    if booked.view.late_holders:
        late = ", ".join(booked.view.late_holders)
        complain(f"{late} may still hold one of these GPUs then: no lease is ended for a booking")


def reservations(endpoint: Endpoints = None, *, fleet: FleetScope = False, json: Json = False) -> None:
    """List bookings and planned drains: which GPUs, for whom, when, and why."""
    servers = one_server(endpoint, is_fleet=fleet)
    if json:
        print_body(servers.run(lambda opened: call(opened, "/bookings", what="the bookings are not known")).data)
        return
    report = servers.run(_ask)
    if not report.bookings:
        complain("nothing is booked, and no drain is planned")
        return
    now, table = time.time(), make_table("ID", "GPUS", "FOR", "WHEN", "REASON", "BOOKED BY", whole=("GPUS",))
    for booking in report.bookings:
        table.add_row(
            booking.id,
            ", ".join(booking.gpu_ids),
            "maintenance" if booking.is_drain else booking.view.owner or "nobody",
            booking.span(now),
            booking.view.reason,
            booking.view.booked_by or "-",
        )
    print_table(out(), table)


async def _ask(servers: Servers) -> PoolReport:
    report = await ask_pool(servers, servers.ids[0], _QUERY)
    check_any_is_up([report])
    if not report.has_leases:
        raise Failure(f"{report.url} has statistics only, and no leases; run `gpu-pool serve` on that machine")
    return report


async def _book(servers: Servers, booking_id: str, form: dict[str, Any], gpus: list[str]) -> tuple[BookingReport, Any]:
    report = await _ask(servers)
    body = form | ({"among": [_local(report, gpu) for gpu in gpus]} if gpus else {})
    answer = await servers.ask(servers.ids[0], _path(booking_id), "PUT", body)
    again = f"repeat it with --id {booking_id}, which books nothing twice"
    if (
        answer.status is None
        or answer.status > HTTPStatus.SERVICE_UNAVAILABLE
        or answer.status == HTTPStatus.INTERNAL_SERVER_ERROR
    ):
        raise Failure(f"whether it is booked is not known: {plain(answer.error).rstrip('.')}; {again}")
    if not answer.is_ok:
        raise failure_of(answer, f"nothing was booked: {plain(answer.error)}")
    return _read(servers, answer, booking_id)


def _local(report: PoolReport, name: str) -> str:
    """A GPU as the server calls it; in a fleet, `gpu-01:2` by its UUID."""
    known = {gpu.id: gpu.view.uuid for gpu in report.gpus if gpu.view.uuid}
    if ":" in name and name not in known:
        raise Failure(f"{name!r} is not a GPU of {report.endpoint}; `gpu-pool status` shows all", USAGE)
    return known.get(name, name)


async def _cancel(servers: Servers, text: str) -> tuple[BookingReport, Any]:
    """Cancel the booking with this id, or the only one whose id begins so."""
    known = (await _ask(servers)).bookings
    found = [booking for booking in known if booking.id == text]
    found = found or [booking for booking in known if text and booking.id.startswith(text)]
    if len(found) != 1:
        what = f"{len(found)} bookings begin with" if found else "there is no booking"
        raise Failure(f"{what} {plain(text)}; `gpu-pool reservations` lists all", REFUSED)
    answer = await call(servers, _path(found[0].id), "DELETE", what=f"{found[0].id} was not cancelled")
    return found[0], answer.data


def _path(booking_id: str) -> str:
    return f"/bookings/{quote(booking_id, safe='')}"


def _read(servers: Servers, answer: ServerAnswer, booking_id: str) -> tuple[BookingReport, Any]:
    view = read(BookingView, answer.data, clean=plain)
    if view is None or view.id != booking_id:
        unsure = f"whether it is booked is not known: the answer of {answer.url} shows no such booking"
        raise Failure(f"{unsure}; `gpu-pool reservations` lists all")
    return BookingReport(servers.naming(answer.endpoint), view), answer.data
