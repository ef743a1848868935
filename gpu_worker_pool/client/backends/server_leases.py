"""Leases from a server that has them."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from operator import attrgetter
from typing import Any

from gpu_worker_pool.client.endpoints.endpoint import Endpoint
from gpu_worker_pool.core.model.lease import EndReason
from gpu_worker_pool.core.model.request import MAX_TIME_LIMIT_S, Holder, Request, Wishes
from gpu_worker_pool.host.addresses import is_this_machine
from gpu_worker_pool.host.clock import boot_id
from gpu_worker_pool.host.identity import own_proc, pid_namespace
from gpu_worker_pool.host.processes import ProcessTable
from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.models import LeaseEnding
from gpu_worker_pool.wire.endings import ending
from gpu_worker_pool.wire.leases import EndWarning, HeldLeaseView, RenewAnswer
from gpu_worker_pool.wire.pool import PoolView
from gpu_worker_pool.wire.reader import plain, read, read_time
from gpu_worker_pool.wire.transport import Reply

from .grant_check import NotReadYet, UnbelievableGrant, check_grant
from .granter import Granter
from .lease_book import Granted, LeaseAnswer, NeverGranted, NotBelieved, Over, Queued, Renewal

logger = logging.getLogger("gpu_worker_pool.client")

# What a server says of times is rounded.
ROUNDED_S = 0.001
# Statuses after which asking the same again is of no use.
HOPELESS = frozenset({400, 401, 403, 404, 405, 409, 413, 415, 422})


def holder(worker_id: str, pid: int | None = None) -> Holder:
    """The holder of a lease, with what a server on its machine needs to watch its process: this one, or `pid`."""
    facts = _own_facts(os.getpid()) if pid is None else _facts_of(pid)
    return Holder(worker_id, *_facts(facts))


def _facts_of(pid: int) -> Holder:
    namespace = pid_namespace()
    return Holder(
        owner=user_name(),
        host=socket.gethostname(),
        pid=pid,
        pid_started=ProcessTable(proc).started(pid) if (proc := own_proc()) else None,
        boot_id=boot_id() if namespace else None,  # without /proc a server cannot watch the process
        pid_namespace=namespace,
    )


# Read once a process. A forked child has another pid, so it does not use its parent's.
_own_facts = lru_cache(maxsize=1)(_facts_of)


class ServerLeases:
    """The leases of one endpoint; with a `fleet_id`, those of its whole fleet, of which it is an entry point."""

    needs_heartbeat = True

    def __init__(self, endpoint: Endpoint, fleet_id: str | None = None) -> None:
        self.endpoint = self._endpoint = endpoint
        self.endpoint_id: str | None = endpoint.id
        self._scope = "" if fleet_id is None else "/fleet"
        # Whether the server holds the answer to a renewal; an older one refuses to be asked.
        self._holds_renewals = True
        # Which server granted each lease. Another one may answer at the same address later.
        self._granters: dict[str, Granter] = {}
        self._strangers: set[Granter] = set()
        # An entry point knows the leases that others have granted too, as long as it is one of the same fleet.
        self._any_granter = None if fleet_id is None else Granter(fleet_id)

    async def ask(self, lease_id: str, request: Request, wait_s: float = 0.0) -> LeaseAnswer:
        """See `LeaseBook.ask`. The server may hold its answer for `wait_s`, until the GPUs are granted."""
        is_local = is_this_machine(self._endpoint.url.host)
        body = _body(request, is_local=is_local, wait_s=wait_s)
        reply = await self._endpoint.call("PUT", f"{self._scope}/leases/{lease_id}", body=body, extra_s=wait_s)
        return self._answer(reply, lease_id, request)

    async def wait(self, lease_id: str, request: Request, wait_s: float) -> LeaseAnswer:
        reply = await self._endpoint.call("GET", f"{self._scope}/leases/{lease_id}?wait_s={wait_s:g}", extra_s=wait_s)
        if reply.status == 404:
            return Over("the server does not know it any more")
        return self._answer(reply, lease_id, request)

    async def renew(self, lease_ids: Sequence[str], wait_s: float = 0.0, warned: Sequence[str] = ()) -> Renewal:
        if not self._holds_renewals:
            wait_s = 0.0
        form = {"ids": list(lease_ids), "wait_s": wait_s, "warned": list(warned)}
        body = {name: value for name, value in form.items() if value}  # an older server knows only the ids
        reply = await self._endpoint.call(
            "POST", f"{self._scope}/leases/renew", body=body, extra_s=wait_s, is_vital=True
        )
        if wait_s and reply.status == 422:
            self._holds_renewals = False
            return await self.renew(lease_ids, warned=warned)
        answer = read(RenewAnswer, reply.data, clean=plain) if reply.status == 200 else None
        if answer is None:
            raise self._endpoint.error(reply.detail, status=reply.status)
        # The user of the server is looked up only if a loss is told.
        answering = Granter.of(reply, answer.pool_id) if answer.lost else Granter(answer.pool_id)
        own = {lease_id for lease_id in lease_ids if self._is_granter(lease_id, answering, is_whole=bool(answer.lost))}
        if not own:
            raise self._endpoint.error("another server answers")
        lost = [item for item in answer.lost if item.id in own]
        for item in lost:
            self._forget(item.id)
        return Renewal(
            _renewed_at(reply, answer),
            frozenset(item.id for item in answer.renewed if item.id in own),
            {item.id: _over(item.reason, item.by, item.note) for item in lost},
            {item.id: _ending(item.warning) for item in answer.renewed if item.warning is not None and item.id in own},
        )

    async def release(self, lease_id: str) -> None:
        path = f"{self._scope}/leases/{lease_id}"
        reply = await self._endpoint.call("DELETE", f"{path}?as=holder", is_vital=True)
        if reply.status == 422:  # an older server does not know who releases
            reply = await self._endpoint.call("DELETE", path, is_vital=True)
        if reply.status not in {200, 404}:
            raise self._endpoint.error(reply.detail, status=reply.status)
        is_known = lease_id in self._granters or self._any_granter is not None
        # The server that granted it may come back, and has the lease still.
        if reply.status == 404 and is_known and not self._is_granter(lease_id, await self._answering()):
            raise self._endpoint.error("another server answers")
        self._forget(lease_id)

    async def pool_id(self) -> str | None:
        return (await self._answering()).pool_id

    async def _answering(self) -> Granter:
        reply = await self._endpoint.call("GET", "/pool?queue=0&leases=0", is_vital=True)
        pool = read(PoolView, reply.data, clean=plain) if reply.status == 200 else None
        return Granter.of(reply, pool.pool_id if pool else None)

    def _forget(self, lease_id: str) -> None:
        self._granters.pop(lease_id, None)

    def _is_granter(self, lease_id: str, answering: Granter, *, is_whole: bool = True) -> bool:
        """Whether the server that answers granted this lease; if not, that is said once. Not `is_whole`: by its pool only."""
        granter = self._granters.get(lease_id, self._any_granter)
        if granter is None or (granter if is_whole else Granter(granter.pool_id)).has_answered(answering):
            return True
        if answering not in self._strangers:
            self._strangers.add(answering)
            logger.warning(
                "another server answers at %s (%s); lease %s is the affair of the one that granted it (%s), so it goes on "
                "as if no server answered",
                self._endpoint.url.url,
                answering,
                lease_id,
                granter,
                extra={"lease_id": lease_id, "endpoint": self.endpoint_id},
            )
        return False

    def _answer(self, reply: Reply, lease_id: str, request: Request) -> LeaseAnswer:
        if reply.status in HOPELESS:
            return NeverGranted(_too_old(reply, request) or reply.detail)
        if reply.status not in {200, 201, 202}:
            raise self._endpoint.error(reply.detail, status=reply.status)
        lease = read(HeldLeaseView, reply.data, clean=plain)
        if lease is None:
            raise self._endpoint.error("its answer is not a lease")
        if lease.id != lease_id:
            return NotBelieved(f"it answers with the lease {lease.id[:128]!r}, and {lease_id!r} was asked for")
        match lease.state:
            case "active":
                try:
                    gpus, env, node_envs = check_grant(lease, reply.data, request)
                except NotReadYet as error:
                    raise self._endpoint.error(str(error)) from None
                except UnbelievableGrant as error:
                    return NotBelieved(str(error))
                is_local = lease.is_local and lease.expires_in_s is None
                self._granters.setdefault(lease.id, Granter.of(reply, lease.pool_id))
                since, ends_at = _safe_since(reply, lease), _ends_at(lease)
                return Granted(gpus, lease.fence, env, since, is_local, ends_at, lease.pool_id, node_envs)
            case "queued":
                return Queued(lease.reason or "", is_set_aside=lease.position == 0)
        return _over(lease.end_reason or lease.reason or "ended", lease.ended_by, lease.end_note)


def _body(request: Request, *, is_local: bool, wait_s: float = 0.0) -> bytes:
    """What is sent, in JSON. What is not set is left out, so that the server's own default is used."""
    asked = request.wishes, _facts(request.holder), _terms(request), wait_s, is_local
    try:
        same = _same_body(*asked)
    except TypeError:  # a label that is not a text, say: the server refuses it in words
        same = _same_body.__wrapped__(*asked)
    worker_id = request.holder.worker_id
    return same if worker_id is None else b'%s, "worker_id": %s}' % (same[:-1], json.dumps(worker_id).encode())


_FACTS = ("owner", "host", "pid", "pid_started", "boot_id", "pid_namespace")
_TERMS = ("priority", "ttl_s", "labels", "time_limit_s", "preemptible")
_facts, _terms = attrgetter(*_FACTS), attrgetter(*_TERMS)


# A worker asks again and again for the same.
@lru_cache(maxsize=64)
def _same_body(wishes: Wishes, facts: Sequence[Any], terms: Sequence[Any], wait_s: float, is_local: bool) -> bytes:  # noqa: FBT001 - a key of the cache
    """All of a request but its worker. A server on this machine knows the user: in a container the same user may have
    another name.
    """
    values = _values(wishes) | dict(zip(_FACTS, facts, strict=True)) | dict(zip(_TERMS, terms, strict=True))
    del values["node"]  # for the server to find out
    if is_local and sys.platform == "linux":
        del values["owner"]
    form = {**values, "labels": dict(values["labels"]), "wait_s": wait_s}
    sent = {name: value for name, value in form.items() if value is not None and value != {}}
    if not sent["preemptible"]:
        del sent["preemptible"]  # an older server does not know it
    if sent["nodes"] == 1:
        del sent["nodes"]  # the same
    return json.dumps(sent).encode()


def _values(body: Wishes) -> dict[str, Any]:
    """The fields by name. `asdict` would copy each value."""
    return {name: getattr(body, name) for name in body.__dataclass_fields__}


def _over(reason: str, by: str | None, note: str | None) -> Over:
    return Over(reason, ending(reason, by, note), is_final=reason == EndReason.REVOKED or by is not None)


def _too_old(reply: Reply, request: Request) -> str | None:
    """What to tell the user of a server that does not know time limits: to ask it without would be another request."""
    asked = {"time_limit_s": request.time_limit_s is not None, "preemptible": request.preemptible}
    unknown = [name for name, is_asked in asked.items() if is_asked and f"{name}: there is no such" in reply.detail]
    if reply.status != 422 or not unknown:
        return None
    what = " or ".join({"time_limit_s": "time limits", "preemptible": "preemptible leases"}[name] for name in unknown)
    return f"its server is older and does not know {what}; update it, or ask without"


def _ending(said: EndWarning) -> LeaseEnding:
    """By the clock of this machine: that of the server may differ."""
    return LeaseEnding(str(said.reason), _local_time(time.time() + min(max(said.ends_in_s, 0.0), MAX_TIME_LIMIT_S)))


def _ends_at(lease: HeldLeaseView) -> datetime | None:
    """When the time limit of a lease that was just granted ends it, by the clock of this machine."""
    if lease.ends_at is None:
        return None
    granted_at, ends_at = read_time(lease.granted_at), read_time(lease.ends_at)
    if granted_at is None or ends_at is None:
        return None
    return _local_time(time.time() + min(max(ends_at - granted_at, 0.0), MAX_TIME_LIMIT_S))


def _local_time(at: float) -> datetime:
    return datetime.fromtimestamp(at)  # noqa: DTZ006 - local time, as all times of the documents


def _renewed_at(reply: Reply, answer: RenewAnswer) -> float:
    """When the leases were renewed at the earliest: once the call had been sent, and the server had held it back."""
    held_s = answer.held_s or 0.0
    return reply.sent_at + (held_s if 0 <= held_s <= reply.took_s else 0.0)


def _safe_since(reply: Reply, lease: HeldLeaseView) -> float | None:
    """When the TTL began at the earliest: when the call was sent, if that call was granted; else by what is left of it,
    because the server answered after the call was sent.
    """
    if reply.status == 201 or (lease.is_local and lease.expires_in_s is None):
        return reply.sent_at
    if lease.ttl_s is None or lease.expires_in_s is None or not 0 <= lease.expires_in_s <= lease.ttl_s:
        return None
    return reply.sent_at - (lease.ttl_s - lease.expires_in_s) - ROUNDED_S
