"""`gpu-pool reserve` and `reservations`: GPUs that are kept for an owner for a span of time."""

from __future__ import annotations

import time
import uuid
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import quote

from gpu_worker_pool.cli.declare import Option
from gpu_worker_pool.cli.failure import REFUSED, USAGE, Failure
from gpu_worker_pool.cli.options import Endpoints, FleetScope, Json, Model
from gpu_worker_pool.cli.output import Text, complain, out, plain, print_json
from gpu_worker_pool.cli.pools.lease_search import ask_pools_or_fail
from gpu_worker_pool.cli.pools.plans import HELD_BACK, BookingReport, show_plan
from gpu_worker_pool.cli.pools.reading import ask_pools
from gpu_worker_pool.cli.pools.refusals import failure_of, not_found
from gpu_worker_pool.cli.pools.report import PoolReport, check_any_is_up
from gpu_worker_pool.cli.pools.servers import ServerAnswer, Servers, find_endpoint
from gpu_worker_pool.cli.table import make_table, print_table
from gpu_worker_pool.cli.units import parse_duration_s, parse_moment
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
            help="From when on: '2026-12-01 09:00' of your time zone, 09:00, or 2h from now. By default from now on.",
        ),
    ] = None,
    for_: Annotated[float | None, Option("--for", parser=parse_duration_s, metavar="4h", help="For how long.")] = None,
    until: Annotated[str | None, Option("--until", metavar="TIME", help="Until when, instead of --for.")] = None,
    gpus: Annotated[
        int | None,
        Option("--gpus", "-g", min=1, max=1024, help="How many GPUs, all in one machine; 1 without it."),
    ] = None,
    owner: Annotated[
        str | None,
        Option("--owner", metavar="NAME", help="For whom; without it, for you. Others: only admin may."),
    ] = None,
    model: Model = None,
    gpu: Annotated[
        list[str] | None,
        Option("--gpu", metavar="GPU", help="This GPU, by its name or UUID, as `status` shows it; may be given again."),
    ] = None,
    reason: Annotated[str, Option("--reason", help="Why; every user is shown it.")] = "",
    id_: Annotated[
        str | None,
        Option("--id", metavar="ID", help="The id of the booking; with a known id, that one is changed."),
    ] = None,
    cancel: Annotated[
        str | None, Option("--cancel", metavar="ID", help="Cancel this booking, and book nothing.")
    ] = None,
    fleet: FleetScope = False,
    json: Json = False,
) -> None:
    """Book GPUs for a span of time: they are kept for the owner, and others may use them only until then.

    Administrators may book for every owner; all others for themselves, as many GPUs as their quota has. With several
    servers, the first that has the GPUs books them. The owner gets them by a usual request, `gpu-pool run` for instance.
    """
    now = time.time()
    if cancel is not None:
        if any(given is not None for given in (at, for_, until, gpus, owner, model, gpu, id_)):
            raise Failure("--cancel books nothing; leave the other options out", USAGE)
        cancelled = Servers(endpoint, is_fleet=fleet).run(lambda servers: _cancel(servers, cancel))
        _show("cancelled: ", cancelled, now, json=json)
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
    booked = Servers(endpoint, is_fleet=fleet).run(lambda servers: _book(servers, booking_id, form, gpu or []))
    _show("", booked, now, json=json)


def reservations(endpoint: Endpoints = None, *, fleet: FleetScope = False, json: Json = False) -> None:
    """List all bookings and planned drains: which GPUs, for whom, from when until when, and why."""
    reports = Servers(endpoint, is_fleet=fleet).run(lambda servers: ask_pools(servers, _QUERY))
    check_any_is_up(reports)
    found = [booking for report in reports if report.same_as is None for booking in report.bookings]
    down = [report for report in reports if not report.is_up]
    for report in down:
        complain(f"{report.endpoint} is down, its bookings are not shown: {report.error}")
    if json:
        missing = [{"endpoint": report.endpoint, "error": report.error} for report in down]
        print_json("reservations", {"bookings": [booking.as_json() for booking in found], "down": missing})
        return
    if not found:
        complain("nothing is booked, and no drain is planned")
        return
    now, table = time.time(), make_table("ID", "GPUS", "FOR", "WHEN", "REASON", "BOOKED BY", whole=("GPUS",))
    for booking in found:
        table.add_row(
            Text(booking.id),
            Text(", ".join(booking.gpu_ids)),
            Text("maintenance" if booking.is_drain else booking.view.owner or "nobody"),
            Text(booking.span(now)),
            Text(booking.view.reason),
            Text(booking.view.booked_by or "-"),
        )
    print_table(out(), table)


def _show(before: str, booking: BookingReport, now: float, *, json: bool) -> None:
    if json:
        print_json("reserve", {**booking.as_json(), "is_cancelled": bool(before)})
    else:
        out().print(f"{before}{show_plan(booking, now)} ({booking.id})")
        if not before:
            complain(HELD_BACK)
        if booking.view.late_holders and not before:
            complain(
                f"{', '.join(booking.view.late_holders)} may still hold one of these GPUs then: nothing ends that lease before"
            )


async def _book(servers: Servers, booking_id: str, form: dict[str, Any], gpus: list[str]) -> BookingReport:
    """Book at the first server that can. The id is known there, or the GPUs are named, or any may do."""
    named = [] if servers.is_fleet else [find_endpoint(gpu, servers.ids) for gpu in gpus]
    reports = await ask_pools_or_fail(servers)
    able = [report for report in reports if report.is_up and report.has_leases and report.same_as is None]
    if servers.is_fleet:
        named = [_find_in_fleet(gpu, able) for gpu in gpus]
    if len({where for where, _ in named}) > 1:
        raise Failure("the GPUs are of several servers; book those of each by itself", USAGE)
    knowing = [report for report in able if booking_id in {booking.id for booking in report.bookings}]
    able = [report for report in knowing or able if not named or report.endpoint == named[0][0]]
    if not able:
        raise Failure("no server that could book these GPUs has answered; `gpu-pool status` shows what there is")
    body = form | ({"among": [local for _, local in named]} if named else {})
    refused: list[ServerAnswer] = []
    for report in able:
        answer = await servers.ask(report.endpoint, _path(booking_id), "PUT", body)
        if answer.is_ok:
            return _read(servers, answer, booking_id)
        if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
            # It says why, and has changed nothing.
            refused.append(answer)
            continue
        if answer.status is None or answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise Failure(
                f"whether it is booked is not known: {answer.endpoint}: {plain(answer.error).rstrip('.')}; repeat it with "
                f"--id {booking_id}, which books nothing twice"
            )
        if answer.status == HTTPStatus.NOT_FOUND:
            raise not_found(answer, report)
        refused.append(answer)
    reasons = " ".join(f"{answer.endpoint}: {plain(answer.error)}" for answer in refused)
    again = "" if refused[-1].status != HTTPStatus.SERVICE_UNAVAILABLE else f" Repeat it later with --id {booking_id}."
    raise failure_of(refused[-1], f"nothing was booked. {reasons}{again}")


def _find_in_fleet(name: str, reports: list[PoolReport]) -> tuple[str, str]:
    """The endpoint of a GPU that is named as in its fleet, `gpu-01:2`, and its UUID."""
    for report in reports:
        for gpu in report.gpus:
            if name in (gpu.id, gpu.view.uuid) and gpu.view.uuid:
                return report.endpoint, gpu.view.uuid
    raise Failure(f"{name!r} is not a GPU of the fleet; `gpu-pool status --fleet` shows all", USAGE)


async def _cancel(servers: Servers, text: str) -> BookingReport:
    """Cancel the booking with this id, or the only one whose id begins so."""
    reports = await ask_pools_or_fail(servers)
    known = [booking for report in reports if report.same_as is None for booking in report.bookings]
    found = [booking for booking in known if booking.id == text]
    found = found or [booking for booking in known if text and booking.id.startswith(text)]
    if len(found) != 1:
        what = f"{len(found)} bookings begin with" if found else "there is no booking"
        raise Failure(f"{what} {plain(text)}; `gpu-pool reservations` lists all", REFUSED)
    (booking,) = found
    answer = await servers.ask(booking.naming.endpoint, _path(booking.id), "DELETE")
    if not answer.is_ok:
        raise failure_of(answer, f"{booking.id} was not cancelled: {plain(answer.error)}")
    return booking


def _path(booking_id: str) -> str:
    return f"/bookings/{quote(booking_id, safe='')}"


def _read(servers: Servers, answer: ServerAnswer, booking_id: str) -> BookingReport:
    view = read(BookingView, answer.data, clean=plain)
    if view is None or view.id != booking_id:
        raise Failure(
            f"whether it is booked is not known: the answer of {answer.url} shows no such booking; "
            "`gpu-pool reservations` lists all"
        )
    return BookingReport(servers.naming(answer.endpoint), view)
