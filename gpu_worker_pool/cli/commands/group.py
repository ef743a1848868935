"""`gpu-pool group`: owners who share a quota, or go first on some GPUs."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

from gpu_worker_pool.cli.declare import Argument, Option
from gpu_worker_pool.cli.options import Endpoints, Json
from gpu_worker_pool.cli.output import complain, out, print_body
from gpu_worker_pool.cli.pools.report import describe_group, first_on
from gpu_worker_pool.cli.pools.servers import ask_one, read_answer
from gpu_worker_pool.cli.table import make_table, print_table
from gpu_worker_pool.failure import USAGE, Failure
from gpu_worker_pool.wire.plans import GroupList, GroupView

Name = Annotated[str, Argument(metavar="GROUP", help="The name of the group.")]


def list_groups(endpoint: Endpoints = None, *, json: Json = False) -> None:
    """List the groups, with their members, what they have, and the GPUs on which their requests go first."""
    answer = ask_one(endpoint, "/groups", what="the groups cannot be listed")
    if json:
        print_body(answer.data)
        return
    listed = read_answer(GroupList, answer, "groups")
    if not listed.groups:
        complain("there are no groups; `gpu-pool group add` makes one")
        return
    table = make_table("GROUP", "QUOTA", "HAS", "WAITS", "FIRST ON", "MEMBERS", whole=("QUOTA", "HAS", "WAITS"))
    for group in listed.groups:
        held = "-" if group.held_gpus is None else f"{group.held_gpus:g}"
        limit = "-" if group.quota is None else str(group.quota)
        table.add_row(group.name, limit, held, str(group.queued), first_on(group), ", ".join(group.members))
    print_table(out(), table)


def add_group(
    name: Name,
    endpoint: Endpoints = None,
    *,
    members: Annotated[
        str, Option("--members", metavar="NAMES", help="Owners, with commas between; a Unix group as @name.")
    ],
    gpus: Annotated[
        str | None,
        Option("--gpus", metavar="GPUS", help="With --first-right, these GPUs: box1:4-7, a box, 0,2, or UUIDs."),
    ] = None,
    first_right: Annotated[
        bool,
        Option(
            "--first-right",
            help="Their requests go first on --gpus; others use these preemptibly, or until a member asks.",
        ),
    ] = False,
    quota: Annotated[int | None, Option("--quota", min=0, help="At most this many GPUs together.")] = None,
) -> None:
    """Make a group, or replace it: its members share a quota, or go first on some GPUs. For administrators."""
    if first_right != (gpus is not None):
        raise Failure("--first-right and --gpus belong together: give both, or none of them", USAGE)
    if gpus is None and quota is None:
        raise Failure("give --quota, or --gpus with --first-right; a group with neither changes nothing", USAGE)
    form = {"members": _parts(members), "quota": quota, "first_right": _parts(gpus or "")}
    if not form["members"]:
        raise Failure("--members names nobody; give owners with commas between, such as @vision,alice", USAGE)
    group = read_answer(GroupView, ask_one(endpoint, _path(name), "PUT", form, what=f"the group {name} was not set"))
    if group.warning:
        complain(f"check the members of {name}: {group.warning}")
    out().print(f"{name}: {describe_group(group)}")


def remove_group(name: Name, endpoint: Endpoints = None) -> None:
    """Remove a group. For administrators."""
    ask_one(endpoint, _path(name), "DELETE", what=f"the group {name} was not removed")
    out().print(f"the group {name} is removed")


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _path(name: str) -> str:
    return f"/groups/{quote(name, safe='')}"
