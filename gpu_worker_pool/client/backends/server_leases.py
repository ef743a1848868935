"""Leases from a server that has them, or from a fleet by any of its boxes."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import lru_cache
from math import inf
from typing import Any, Final, TypeVar
from urllib.parse import quote

from gpu_worker_pool.client.endpoints.endpoint import Endpoint
from gpu_worker_pool.client.http.transport import Reply
from gpu_worker_pool.core.model.bounds import show_span
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey
from gpu_worker_pool.core.model.lease import EndReason
from gpu_worker_pool.core.model.request import MAX_TIME_LIMIT_S, Request, is_gpu_name
from gpu_worker_pool.errors import EndpointError
from gpu_worker_pool.gpus.grant_env import VISIBLE_DEVICES, GrantedGpu, grant_env
from gpu_worker_pool.host.addresses import is_this_machine
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.models import LeaseEnding
from gpu_worker_pool.wire.bounds import is_printable
from gpu_worker_pool.wire.leases import (
    EndWarning,
    GangLeaseView,
    GpuRef,
    LeaseView,
    NodePart,
    RenewAnswer,
    WantedView,
    ending,
)
from gpu_worker_pool.wire.pool import PoolView
from gpu_worker_pool.wire.reader import has_all, plain, read, read_time

from .lease_backend import LeaseAnswer, NeverGranted, Over, Queued, Renewal, granted, local_time

logger = logging.getLogger("gpu_worker_pool.client")
T = TypeVar("T")

# What a server says of times is rounded.
ROUNDED_S: Final = 0.001
# Statuses after which asking the same again is of no use.
HOPELESS: Final = frozenset({400, 401, 403, 404, 405, 409, 413, 415, 422})
# How long an entry point may be silent before the next one is asked. The last one has the time of any call.
PATIENCE_S: Final = 2.0
# A renewal is not held back at the second entry point, and must get through in time.
LEAST_PATIENCE_S: Final = 0.5
# For this time an entry point that failed is asked after the others.
AVOIDED_S: Final = 10.0
# No GPU has such an index, MIG devices included.
MAX_INDEX: Final = 1_000_000


class ServerLeases:
    """The leases of the server at `home`; with a `fleet_id`, those of its whole fleet, which has several entry points.

    What one entry point does not answer is asked of the next, under the same id: every call is the same at each of them,
    because one pool answers. `entries` are those at present; that of `home` is asked first while it works. `name_of` tells
    what the GPUs of a node are called by.
    """

    def __init__(
        self,
        home: Endpoint,
        fleet_id: str | None = None,
        entries: Callable[[], Sequence[Endpoint]] | None = None,
        on_failure: Callable[[EndpointError], None] = lambda _: None,
        name_of: Callable[[str], str] | None = None,
        *,
        is_multi: bool = False,
    ) -> None:
        self.home = home
        self.fleet_id = fleet_id
        self.is_multi = is_multi
        self._entries = entries or (lambda: (home,))
        self._name_of = name_of or (lambda _: home.id)
        self._on_failure = on_failure
        self._path = "/leases" if fleet_id is None else "/fleet/leases"
        self._failed_at: dict[str, float] = {}
        # Which pool granted each lease: another server may answer at the same address later. In a fleet any box may.
        self._granters: dict[str, str | None] = {}
        self._strangers: set[str | None] = set()

    @property
    def url(self) -> str | None:
        return self.home.url.url

    @property
    def endpoint_id(self) -> str:
        return self.home.id

    @property
    def entries(self) -> list[Endpoint]:
        """The entry points, those that work first: the home, then the others as they were given."""
        now = boot_time()

        def rank(entry: Endpoint) -> tuple[bool, bool]:
            has_failed = now - self._failed_at.get(entry.id, now - AVOIDED_S) < AVOIDED_S
            return has_failed or not entry.is_healthy, entry is not self.home

        return sorted(self._entries(), key=rank)

    async def ask(self, lease_id: str, request: Request) -> LeaseAnswer:
        async def ask(entry: Endpoint) -> LeaseAnswer:
            body = body_of(request, is_local=is_this_machine(entry.url.host))
            reply = await entry.call("PUT", f"{self._path}/{lease_id}", body=body)
            return self._answer(entry, reply, lease_id, request)

        return await self._at_first(ask, PATIENCE_S)

    async def wait(self, lease_id: str, request: Request, wait_s: float) -> LeaseAnswer:
        async def wait(entry: Endpoint) -> LeaseAnswer:
            reply = await entry.call("GET", f"{self._path}/{lease_id}?wait_s={wait_s:g}", extra_s=wait_s)
            if reply.status == 404:
                return Over("the server does not know it any more")
            return self._answer(entry, reply, lease_id, request)

        return await self._at_first(wait, wait_s + PATIENCE_S)

    async def renew(self, lease_ids: Sequence[str], wait_s: float = 0.0, warned: Sequence[str] = ()) -> Renewal:
        async def renew(entry: Endpoint) -> Renewal:
            nonlocal wait_s
            held_s, wait_s = wait_s, 0.0  # the next entry point must not hold it back
            values = {"ids": list(lease_ids), "wait_s": held_s, "warned": list(warned)}
            body = {name: value for name, value in values.items() if value}
            reply = await entry.call("POST", f"{self._path}/renew", body=body, extra_s=held_s, is_vital=True)
            return self._renewal(entry, reply, lease_ids)

        # As long again as the answer is held: then another entry point can renew it before it is given up.
        return await self._at_first(renew, wait_s + min(max(wait_s, LEAST_PATIENCE_S), PATIENCE_S))

    async def release(self, lease_id: str, note: str | None = None) -> None:
        why = "" if note is None else f"&reason={quote(note)}"

        async def release(entry: Endpoint) -> None:
            reply = await entry.call("DELETE", f"{self._path}/{lease_id}?as=holder{why}", is_vital=True)
            if reply.status not in {200, 404}:
                raise entry.error(reply.detail, status=reply.status)
            if reply.status == 404 and self._granter(lease_id) is not None:
                pool = await entry.call("GET", "/pool?queue=0&leases=0", is_vital=True)
                found = read(PoolView, pool.data, clean=plain)
                if not self._is_granter(entry, lease_id, None if found is None else found.pool_id):
                    # The server that granted it may come back, and has the lease still.
                    raise entry.error("another server answers")
            self._granters.pop(lease_id, None)

        await self._at_first(release, PATIENCE_S)

    async def is_wanted(self, lease_id: str) -> bool:
        """Whether a waiter would be served before a new request like this if the lease were released now."""

        async def ask(entry: Endpoint) -> bool:
            reply = await entry.call("GET", f"{self._path}/{lease_id}/wanted")
            answer = read(WantedView, reply.data, clean=plain) if reply.status == 200 else None
            if answer is None:
                raise entry.error(reply.detail, status=reply.status)
            return answer.is_wanted

        return await self._at_first(ask, PATIENCE_S)

    def with_endpoints(self, endpoints: Mapping[str, Endpoint]) -> ServerLeases:
        """The same leases, by endpoints of another loop."""
        entries = [endpoints[entry.id] for entry in self.entries]
        return ServerLeases(endpoints[self.home.id], self.fleet_id, lambda: entries)

    async def look_up(self, path: str = "") -> Any:
        """What the server shows of its leases, or of the one at this path; None where it does not know that one, ValueError
        where it says that there can be none.
        """

        async def look_up(entry: Endpoint) -> Any:
            reply = await entry.call("GET", f"{self._path}{path}", attempts=entry.attempts)
            if reply.status == 422:
                raise ValueError(reply.detail)
            if reply.status not in {200, 202, 404}:
                raise entry.error(reply.detail, status=reply.status)
            return None if reply.status == 404 else reply.data

        return await self._at_first(look_up, PATIENCE_S)

    async def _at_first(self, call: Callable[[Endpoint], Awaitable[T]], patience_s: float) -> T:
        """What the first entry point that works answers; EndpointError with all reasons where none does."""
        entries, errors = self.entries, []
        for entry in entries:
            try:
                async with asyncio.timeout(None if entry is entries[-1] else patience_s):
                    answer = await call(entry)
            except TimeoutError:
                error = entry.error(f"it has not answered within {patience_s:.1f} s", is_temporary=True)
            except EndpointError as failed:
                error = failed
            else:
                self._failed_at.pop(entry.id, None)
                return answer
            self._failed_at[entry.id] = boot_time()
            self._on_failure(error)
            errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        if not errors:
            raise self.home.error("no endpoint is known to belong to this fleet any more", is_temporary=True)
        reasons = "; ".join(f"{error.endpoint_id}: {error.reason.rstrip('. ')}" for error in errors)
        statuses = {error.status for error in errors}
        status = errors[0].status if len(statuses) == 1 else None
        raise self.home.error(f"none of its entry points took it ({reasons})", status=status, is_temporary=True)

    def _renewal(self, entry: Endpoint, reply: Reply, lease_ids: Sequence[str]) -> Renewal:
        answer = read(RenewAnswer, reply.data, clean=plain) if reply.status == 200 else None
        if answer is None:
            raise entry.error(reply.detail, status=reply.status)
        own = {id_ for id_ in lease_ids if self._is_granter(entry, id_, answer.pool_id)}
        if not own:
            raise entry.error("another server answers")
        lost = [item for item in answer.lost if item.id in own]
        for item in lost:
            self._granters.pop(item.id, None)
        renewed = [item for item in answer.renewed if item.id in own]
        held_s = answer.held_s or 0.0
        return Renewal(
            # At the earliest: once the call had been sent, and the server had held it back.
            reply.sent_at + (held_s if 0 <= held_s <= reply.took_s else 0.0),
            frozenset(item.id for item in renewed),
            {item.id: _over(item.reason, item.by, item.note) for item in lost},
            {item.id: _ending(item.warning) for item in renewed if item.warning is not None},
        )

    def _granter(self, lease_id: str) -> str | None:
        """The pool that granted a lease; None where that is not known."""
        return self._granters.get(lease_id, self.fleet_id)

    def _is_granter(self, entry: Endpoint, lease_id: str, pool_id: str | None) -> bool:
        """Whether the pool that answers granted this lease; if not, that is said once."""
        granter = self._granter(lease_id)
        if granter is None or granter == pool_id:
            return True
        if pool_id not in self._strangers:
            self._strangers.add(pool_id)
            logger.warning(
                "another server answers at %s (%s); only the server that granted lease %s (pool %s) can end it, so the lease "
                "goes on as if no server answered",
                entry.url.url,
                "a pool without an identity" if pool_id is None else f"pool {pool_id[:8]}",
                lease_id,
                granter[:8],
                extra={"lease_id": lease_id, "endpoint": entry.id},
            )
        return False

    def _answer(self, entry: Endpoint, reply: Reply, lease_id: str, request: Request) -> LeaseAnswer:
        if reply.status in HOPELESS:
            return NeverGranted(reply.detail)
        if reply.status not in {200, 201, 202}:
            raise entry.error(reply.detail, status=reply.status)
        lease = read(GangLeaseView, reply.data, clean=plain)
        if lease is None:
            raise entry.error("its answer is not a lease")
        if lease.id != lease_id:
            other = f"it answers with the lease {lease.id[:128]!r}, and {lease_id!r} was asked for"
            return NeverGranted(other, is_grant=True)
        if lease.state == "queued":
            return Queued(lease.reason or "", is_set_aside=lease.position == 0)
        if lease.state != "active":
            return _over(lease.end_reason or lease.reason or "ended", lease.ended_by, lease.end_note)
        if has_all(lease, reply.data, "gpus") and (not lease.gpus or any(ref.gpu_id is None for ref in lease.gpus)):
            # One that has just started has not read the GPU yet.
            raise entry.error("its answer grants no GPU that it can name")
        if (why := why_unusable(lease, reply.data, request)) is not None:
            return NeverGranted(why, is_grant=True)
        if self.fleet_id is None:
            self._granters.setdefault(lease.id, lease.pool_id)
        gpus = [Gpu(GpuKey(ref.node or "", ref.uuid), ref.gpu_id or 0, ref.name or "") for ref in lease.gpus]
        node_envs = {part.node: environment(part) for part in lease.nodes}
        return granted(
            self,
            lease.id,
            request,
            [(self._name_of(gpu.key.node), gpu) for gpu in gpus],
            _safe_since(reply, lease),
            is_local=lease.is_local and lease.expires_in_s is None,
            fence=lease.fence,
            env=node_envs[gpus[0].key.node] if node_envs else environment(lease),
            node_envs=node_envs,
            ends_at=_ends_at(lease),
        )


_own_name = lru_cache(maxsize=1)(user_name)


def body_of(request: Request, *, is_local: bool) -> dict[str, Any]:
    """What is sent. What is not set is left out, so that the server's own default is used."""
    asked = asdict(request)
    values = {**asked.pop("wishes"), **asked.pop("holder"), **asked, "labels": dict(request.labels)}
    if is_local and sys.platform == "linux" and request.holder.owner == _own_name():
        # A server on this machine knows the user: in a container the same user may have another name.
        del values["owner"]
    if request.wishes.nodes == 1:
        del values["nodes"]
    return {name: value for name, value in values.items() if value is not None and value is not False and value != {}}


def why_unusable(lease: GangLeaseView, data: Mapping[str, Any], request: Request) -> str | None:
    """Why a grant is not what was asked for; None if it is. `data` is the body that `lease` was read from."""
    gpus, wishes = lease.gpus, request.wishes
    nodes = {ref.node for ref in gpus}
    if not has_all(lease, data, "gpus") or any(map(_is_odd, gpus)):
        return "it grants a GPU that cannot be read"
    if len(gpus) != wishes.total_gpus or len(nodes) != wishes.nodes:
        where = "" if wishes.nodes == 1 == len(nodes) else f" on {len(nodes)} nodes"
        return f"it grants {len(gpus)} GPUs{where}, and {wishes.total_gpus} were asked for"
    if min(len({(ref.node, ref.uuid) for ref in gpus}), len({(ref.node, ref.gpu_id) for ref in gpus})) < len(gpus):
        return "it grants the same GPU twice"
    if wishes.nodes > 1 and nodes != {part.node for part in lease.nodes}:
        return "it does not say which GPUs are on which node"
    if request.time_limit_s is not None and (lease.ends_at is None or lease.granted_at is None):
        return f"its lease does not end, and a limit of {show_span(request.time_limit_s)} was asked for"
    return None


def _is_odd(ref: GpuRef) -> bool:
    return not (0 <= (ref.gpu_id or 0) < MAX_INDEX and is_gpu_name(ref.uuid) and is_printable(ref.name or ""))


def environment(part: LeaseView | NodePart) -> dict[str, str]:
    """The variables that show a process these GPUs and no others. They are made here: nothing else that a server sends
    reaches the environment of a process. The server says only whether CUDA is given UUIDs.
    """
    names = part.env.get(VISIBLE_DEVICES, "").split(",")
    gpus = [GrantedGpu(ref.gpu_id, ref.uuid) for ref in part.gpus]
    return grant_env(gpus, by_uuid=not all(name.isdigit() for name in names))


def _over(reason: str, by: str | None, note: str | None) -> Over:
    return Over(reason, ending(reason, by, note), is_final=reason == EndReason.REVOKED or by is not None)


def _ending(said: EndWarning) -> LeaseEnding:
    """By the clock of this machine: that of the server may differ."""
    return LeaseEnding(str(said.reason), local_time(time.time() + min(max(said.ends_in_s, 0.0), MAX_TIME_LIMIT_S)))


def _ends_at(lease: GangLeaseView) -> datetime | None:
    """When the time limit of a lease that was just granted ends it, by the clock of this machine."""
    granted_at, ends_at = read_time(lease.granted_at), read_time(lease.ends_at)
    if granted_at is None or ends_at is None:
        return None
    return local_time(time.time() + min(max(ends_at - granted_at, 0.0), MAX_TIME_LIMIT_S))


def _safe_since(reply: Reply, lease: GangLeaseView) -> float:
    """When the TTL began at the earliest: when the call was sent, if that call was granted; else by what is left of it,
    because the server answered after the call was sent. Minus infinity where the server does not say it.
    """
    if reply.status == 201 or (lease.is_local and lease.expires_in_s is None):
        return reply.sent_at
    if lease.ttl_s is None or lease.expires_in_s is None or not 0 <= lease.expires_in_s <= lease.ttl_s:
        return -inf
    return reply.sent_at - (lease.ttl_s - lease.expires_in_s) - ROUNDED_S
