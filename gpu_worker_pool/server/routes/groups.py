"""The calls about groups: owners who share a quota, or go first on some GPUs."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import Group, is_name
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.host.users import members_of
from gpu_worker_pool.ledger.journal import NotWritten
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.forms import GroupForm
from gpu_worker_pool.server.http.call import Call
from gpu_worker_pool.server.http.pool_route import ADMIN, PoolRouter
from gpu_worker_pool.server.http.problems import Refusal
from gpu_worker_pool.server.views.pool_view import group_view, group_views
from gpu_worker_pool.wire.plans import GroupList, GroupView

logger = logging.getLogger(__name__)

MAX_GROUPS = 100
# A change of a Unix group counts after this time at most.
RESOLVED_EVERY_S = 60.0
_SPAN = re.compile(r"(?:(?P<node>.+):)?(?P<first>\d{1,5})(?:-(?P<last>\d{1,5}))?")

router = PoolRouter(tags=("leases",), answered_by="leader")


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
    warning = (
        f"no user of the server's machine, and nobody who was seen here: {', '.join(strangers)}" if strangers else None
    )
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
