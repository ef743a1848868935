"""`gpu-pool quota`: how much each owner may use."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

from gpu_worker_pool.cli.declare import Argument, Option
from gpu_worker_pool.cli.options import Endpoints, Json
from gpu_worker_pool.cli.output import complain, out, print_body
from gpu_worker_pool.cli.pools.report import describe_group
from gpu_worker_pool.cli.pools.servers import ask_one, read_answer
from gpu_worker_pool.cli.table import Table, make_table, print_table
from gpu_worker_pool.cli.units import count, parse_duration_s, show_duration
from gpu_worker_pool.failure import USAGE, Failure
from gpu_worker_pool.wire.plans import QuotaList, QuotaView

Owner = Annotated[str, Argument(metavar="OWNER", help="The owner; '*' for all without a quota of their own.")]


def list_quotas(endpoint: Endpoints = None, *, json: Json = False) -> None:
    """List all quotas, with what their owners hold and used lately; and owners without a quota."""
    answer = ask_one(endpoint, "/quotas", what="the quotas cannot be listed")
    if json:
        print_body(answer.data)
        return
    listed = read_answer(QuotaList, answer, "quotas", "others")
    if not listed.quotas and not listed.others and not listed.groups:
        complain("there are no quotas, and nobody has used a GPU")
        return
    if not listed.fair_share and any(quota.weight != 1 for quota in listed.quotas):
        complain("fair share is off (GPU_POOL_FAIR_SHARE), so weights have no effect")
    print_table(out(), _table(listed))
    for group in listed.groups:
        out().print(f"group {group.name}: {describe_group(group)}")


def set_quota(
    owner: Owner,
    endpoint: Endpoints = None,
    *,
    gpus: Annotated[int | None, Option("--gpus", min=0, help="At most this many GPUs at a time.")] = None,
    weight: Annotated[float | None, Option("--weight", help="The owner's weight in fair share. [1]")] = None,
    max_priority: Annotated[int | None, Option("--max-priority", help="The highest priority.")] = None,
    max_time: Annotated[
        float | None, Option("--max-time", parser=parse_duration_s, metavar="2h", help="The longest time limit.")
    ] = None,
    max_queued: Annotated[int | None, Option("--max-queued", min=0, help="At most this many waiting requests.")] = None,
) -> None:
    """Set the quota of an owner. It replaces the one before: what is left out has no limit. For administrators."""
    limits = {"gpus": gpus, "weight": weight, "max_priority": max_priority}
    limits |= {"max_time_limit_s": max_time, "max_queued": max_queued}
    form = {name: value for name, value in limits.items() if value is not None}
    if not form:
        raise Failure("give at least one limit, such as --gpus 4; `gpu-pool quota remove` removes a quota", USAGE)
    answer = ask_one(endpoint, _path(owner), "PUT", form, what=f"the quota of {owner} was not set")
    out().print(f"{owner}: {_limits(read_answer(QuotaView, answer))}")


def remove_quota(owner: Owner, endpoint: Endpoints = None) -> None:
    """Remove the quota of an owner. For administrators."""
    ask_one(endpoint, _path(owner), "DELETE", what=f"the quota of {owner} was not removed")
    out().print(f"the quota of {owner} is removed")


def _path(owner: str) -> str:
    return f"/quotas/{quote(owner, safe='')}"


def _limits(quota: QuotaView) -> str:
    """`at most 4 GPUs, weight 2, time limit at most 2h`."""
    parts = [
        None if quota.gpus is None else f"at most {count(quota.gpus, 'GPU')}",
        None if quota.weight == 1 else f"weight {quota.weight:g}",
        None if quota.max_priority is None else f"priority at most {quota.max_priority}",
        None if quota.max_time_limit_s is None else f"time limit at most {show_duration(quota.max_time_limit_s)}",
        None if quota.max_queued is None else f"at most {quota.max_queued} waiting",
    ]
    return ", ".join(part for part in parts if part) or "no limits"


def _table(listed: QuotaList) -> Table:
    headings = ("OWNER", "GPUS", "WEIGHT", "HAS", "WAITS", "USED", "SHARE", "LIMITS")
    table = make_table(*headings, whole=headings[1:-1], right=headings[1:-1])
    for quota in (*listed.quotas, *listed.others):
        rest = [
            None if quota.max_priority is None else f"priority {quota.max_priority}",
            None if quota.max_time_limit_s is None else f"time {show_duration(quota.max_time_limit_s)}",
            None if quota.max_queued is None else f"{quota.max_queued} waiting",
            None if quota in listed.quotas else "(no quota)",
        ]
        table.add_row(
            quota.owner,
            _number(quota.gpus),
            f"{quota.weight:g}",
            _number(quota.held_gpus),
            _number(quota.queued),
            "-" if quota.used_gpu_hours is None else f"{quota.used_gpu_hours:.1f}h",
            "-" if quota.share_factor is None else f"{quota.share_factor:.2f}",
            ", ".join(part for part in rest if part),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
