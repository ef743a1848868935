"""`gpu-pool quota`: who may use how much, and who used how much lately."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import quote

from gpu_worker_pool.cli.declare import Argument, Option
from gpu_worker_pool.cli.failure import REFUSED, USAGE, Failure
from gpu_worker_pool.cli.options import Endpoints, Json
from gpu_worker_pool.cli.output import Text, complain, out, plain, print_json
from gpu_worker_pool.cli.pools.refusals import failure_of
from gpu_worker_pool.cli.pools.servers import ServerAnswer, Servers, nobody_answered
from gpu_worker_pool.cli.table import Table, make_table, print_table
from gpu_worker_pool.cli.units import count, parse_duration_s
from gpu_worker_pool.core.model.bounds import show_span
from gpu_worker_pool.wire.plans import QuotaList, QuotaView
from gpu_worker_pool.wire.reader import has_all, read
from gpu_worker_pool.wire.same_server import same_as

Owner = Annotated[str, Argument(metavar="OWNER", help="The owner; `'*'` for all without a quota of their own.")]


@dataclass(frozen=True, slots=True)
class ServerQuotas:
    """The quotas of one server, or in `error` why they are not known."""

    endpoint: str
    url: str
    error: str | None = None
    listed: QuotaList | None = None
    same_as: str | None = None

    def as_json(self) -> dict[str, Any]:
        listed = self.listed
        return {
            "endpoint": self.endpoint,
            "url": self.url,
            "error": self.error,
            "same_as": self.same_as,
            "fair_share": None if listed is None else listed.fair_share,
            "quotas": [asdict(quota) for quota in listed.quotas] if listed else [],
            "others": [asdict(other) for other in listed.others] if listed else [],
        }


def list_quotas(endpoint: Endpoints = None, *, json: Json = False) -> int:
    """List all quotas, with what their owners hold and used lately; and the use of owners without a quota."""
    return _show(Servers(endpoint).run(_ask_all), json=json)


def set_quota(
    owner: Owner,
    endpoint: Endpoints = None,
    *,
    gpus: Annotated[int | None, Option("--gpus", min=0, help="Never more GPUs than this.")] = None,
    weight: Annotated[float | None, Option("--weight", help="The owner's part in a fair share; 1 without it.")] = None,
    max_priority: Annotated[int | None, Option("--max-priority", help="The highest priority.")] = None,
    max_time: Annotated[
        float | None,
        Option("--max-time", parser=parse_duration_s, metavar="2h", help="The longest time limit of a lease."),
    ] = None,
    max_queued: Annotated[int | None, Option("--max-queued", min=0, help="So many requests may wait.")] = None,
    json: Json = False,
) -> int:
    """Set the quota of an owner at every server. It replaces the one before: what is left out has no limit.

    Only admin may.
    """
    limits = {"gpus": gpus, "weight": weight, "max_priority": max_priority}
    limits |= {"max_time_limit_s": max_time, "max_queued": max_queued}
    form = {name: value for name, value in limits.items() if value is not None}
    if not form:
        raise Failure("give at least one limit, such as --gpus 4; `gpu-pool quota remove` removes a quota", USAGE)
    return _change(owner, endpoint, "PUT", form, json=json)


def remove_quota(owner: Owner, endpoint: Endpoints = None, *, json: Json = False) -> int:
    """Remove the quota of an owner at every server that has one. Only admin may."""
    return _change(owner, endpoint, "DELETE", None, json=json)


def _change(owner: str, endpoint: list[str] | None, method: str, form: dict[str, Any] | None, *, json: bool) -> int:
    async def change(servers: Servers) -> tuple[list[ServerAnswer], list[ServerQuotas]]:
        path = f"/quotas/{quote(owner, safe='')}"
        # The boxes of a fleet have one list of quotas.
        once = [each.endpoint for each in await _ask_all(servers) if each.same_as is None]
        answers = [await servers.ask(each, path, method, form) for each in once]
        return answers, await _ask_all(servers)

    answers, listed = Servers(endpoint).run(change)
    done = [answer for answer in answers if answer.is_ok]
    # A server where the owner has no quota has nothing to remove.
    failed = [
        answer for answer in answers if not answer.is_ok and not (done and method == "DELETE" and _has_none(answer))
    ]
    failures = [_failure(answer, owner, method) for answer in failed]
    for failure in failures:
        complain(str(failure))
    if json:
        print_json("quota", {"endpoints": [server.as_json() for server in listed]})
    else:
        for answer in done:
            _say(answer, owner, method)
    return max((failure.code for failure in failures), default=0)


def _has_none(answer: ServerAnswer) -> bool:
    return answer.status == HTTPStatus.NOT_FOUND and "has no quota" in plain(answer.error)


def _failure(answer: ServerAnswer, owner: str, method: str) -> Failure:
    if answer.status == HTTPStatus.NOT_FOUND and not _has_none(answer):
        why = "it has no quotas; is it an older or another kind of server?"
        return Failure(f"the quota of {owner} was not changed at {answer.endpoint}: {why}")
    done = "set" if method == "PUT" else "removed"
    return failure_of(answer, f"the quota of {owner} was not {done} at {answer.endpoint}: {plain(answer.error)}")


def _say(answer: ServerAnswer, owner: str, method: str) -> None:
    if method == "DELETE":
        out().print(f"{owner} has no quota at {answer.endpoint}")
        return
    quota = read(QuotaView, answer.data, clean=plain)
    words = "the server answered something else, so it is not known" if quota is None else _limits(quota)
    out().print(f"{owner} at {answer.endpoint}: {words}")


def _limits(quota: QuotaView) -> str:
    """`at most 4 GPUs, weight 2, time limit at most 2h`."""
    parts = [
        None if quota.gpus is None else f"at most {count(quota.gpus, 'GPU')}",
        None if quota.weight == 1 else f"weight {quota.weight:g}",
        None if quota.max_priority is None else f"priority at most {quota.max_priority}",
        None if quota.max_time_limit_s is None else f"time limit at most {show_span(quota.max_time_limit_s)}",
        None if quota.max_queued is None else f"at most {quota.max_queued} waiting",
    ]
    return ", ".join(part for part in parts if part) or "no limits"


async def _ask_all(servers: Servers) -> list[ServerQuotas]:
    answers = await servers.ask_all("/quotas")
    if all(answer.status is None for answer in answers):
        raise nobody_answered(answers)
    found = [_read(answer) for answer in answers]
    same = same_as((each.endpoint, each.listed.server_id if each.listed else None) for each in found)
    return [ServerQuotas(each.endpoint, each.url, each.error, each.listed, same.get(each.endpoint)) for each in found]


def _read(answer: ServerAnswer) -> ServerQuotas:
    listed = read(QuotaList, answer.data, clean=plain) if answer.is_ok else None
    if listed is not None and has_all(listed, answer.data, "quotas", "others"):
        return ServerQuotas(answer.endpoint, answer.url, listed=listed)
    error = "it has no quotas; is it an older or another kind of server?"
    if not answer.is_ok and answer.status != HTTPStatus.NOT_FOUND:
        error = plain(answer.error)
    return ServerQuotas(answer.endpoint, answer.url, error)


def _show(found: Sequence[ServerQuotas], *, json: bool) -> int:
    if json:
        print_json("quota", {"endpoints": [server.as_json() for server in found]})
    shown = [server for server in found if server.listed is not None and server.same_as is None]
    for server in found:
        if server.error is not None:
            complain(f"the quotas of {server.endpoint} are not known: {server.error}")
    for number, server in enumerate(shown):
        if server.listed is None or json:
            continue
        if len(found) > 1:
            out().print(f"{'' if not number else chr(10)}{server.endpoint} {server.url}")
        if not server.listed.fair_share:
            complain(
                f"{server.endpoint} orders by arrival, not by share (GPU_POOL_FAIR_SHARE), so weights change nothing"
            )
        if server.listed.quotas or server.listed.others:
            print_table(out(), _table(server.listed))
        else:
            complain(f"{server.endpoint} has no quotas, and nobody has used a GPU")
    return 0 if shown else REFUSED


def _table(listed: QuotaList) -> Table:
    headings = ("OWNER", "GPUS", "WEIGHT", "HAS", "WAITS", "USED", "SHARE", "LIMITS")
    table = make_table(*headings, whole=headings[1:-1], right=headings[1:-1])
    for quota in (*listed.quotas, *listed.others):
        is_own = quota in listed.quotas
        rest = [
            None if quota.max_priority is None else f"priority {quota.max_priority}",
            None if quota.max_time_limit_s is None else f"time {show_span(quota.max_time_limit_s)}",
            None if quota.max_queued is None else f"{quota.max_queued} waiting",
            None if is_own else "(no quota of its own)",
        ]
        table.add_row(
            Text(quota.owner),
            _number(quota.gpus),
            f"{quota.weight:g}",
            _number(quota.held_gpus),
            _number(quota.queued),
            "-" if quota.used_gpu_hours is None else f"{quota.used_gpu_hours:.1f}h",
            "-" if quota.share_factor is None else f"{quota.share_factor:.2f}",
            Text(", ".join(part for part in rest if part)),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
