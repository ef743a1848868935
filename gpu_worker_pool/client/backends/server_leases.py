"""Leases from a server that has them."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any

from gpu_worker_pool.client.endpoints.endpoint import Endpoint
from gpu_worker_pool.core.model.request import Holder, Request
from gpu_worker_pool.host.clock import boot_id
from gpu_worker_pool.host.processes import ProcessTable
from gpu_worker_pool.wire.transport import Reply

from .lease_book import Answer, Granted, LeasedGpu, Over, Queued, Refused, Renewal

# What a server says of times is rounded.
ROUNDED_S = 0.001
# Answers after which asking the same again leads nowhere.
HOPELESS = frozenset({400, 401, 403, 404, 405, 409, 413, 415, 422})


def holder(worker_id: str, pid: int | None = None) -> Holder:
    """Who asks, with all by which a server on the same machine can see him live and die: this process, or the one with
    this number, which is to use the GPU.
    """
    facts = _own_facts(os.getpid()) if pid is None else _facts_of(pid)
    return replace(facts, worker_id=worker_id)


@lru_cache(maxsize=1)
def _own_facts(pid: int) -> Holder:
    """Read once a process: a forked child has another pid, so it does not take its parent's facts for its own."""
    return _facts_of(pid)


def _facts_of(pid: int) -> Holder:
    try:
        owner = getpass.getuser()
    except (KeyError, OSError, ImportError):
        owner = None
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = None  # no /proc, so no facts to be seen by
    return Holder(
        owner=owner,
        host=socket.gethostname(),
        pid=pid,
        pid_started=ProcessTable().started(pid),
        boot_id=boot_id() if namespace else None,
        pid_namespace=namespace,
    )


class ServerLeases:
    """The lease calls of one endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def needs_heartbeat(self) -> bool:
        """They end after their TTL."""
        return True

    async def ask(self, lease_id: str, request: Request) -> Answer:
        """PUT /leases/{id}, without waiting."""
        reply = await self._endpoint.call("PUT", f"/leases/{lease_id}", body=_form(request))
        return self._answer(reply)

    async def wait(self, lease_id: str, wait_s: float) -> Answer:
        """GET /leases/{id}, held back by the server."""
        reply = await self._endpoint.call("GET", f"/leases/{lease_id}?wait_s={wait_s:g}", extra_s=wait_s)
        if reply.status == 404:
            return Over("the server does not know it any more")
        return self._answer(reply)

    async def renew(self, lease_ids: Sequence[str]) -> Renewal:
        """POST /leases/renew for all of them."""
        reply = await self._endpoint.call("POST", "/leases/renew", body={"ids": list(lease_ids)}, is_vital=True)
        if reply.status != 200 or not isinstance(reply.data, dict):
            raise self._endpoint.error(reply.detail, status=reply.status)
        renewed = frozenset(item["id"] for item in _items(reply.data.get("renewed")))
        lost = {item["id"]: str(item.get("reason") or "unknown") for item in _items(reply.data.get("lost"))}
        return Renewal(reply.sent_at, renewed, lost)

    async def release(self, lease_id: str) -> None:
        """DELETE /leases/{id}."""
        reply = await self._endpoint.call("DELETE", f"/leases/{lease_id}", is_vital=True)
        if reply.status not in {200, 404}:
            raise self._endpoint.error(reply.detail, status=reply.status)

    def _answer(self, reply: Reply) -> Answer:
        if reply.status in HOPELESS:
            return Refused(reply.detail)
        if reply.status not in {200, 201, 202} or not isinstance(reply.data, dict):
            raise self._endpoint.error(reply.detail, status=reply.status)
        lease = reply.data
        match lease.get("state"):
            case "active":
                gpus = tuple(map(_gpu, _items(lease.get("gpus"), "uuid")))
                if not gpus or any(gpu.index < 0 for gpu in gpus):
                    # A server that has just started may not have looked at its GPUs yet.
                    raise self._endpoint.error("its answer grants no GPU that it can name")
                env = lease.get("env")
                return Granted(
                    gpus,
                    _whole(lease.get("fence")),
                    {str(name): str(value) for name, value in env.items()} if isinstance(env, dict) else {},
                    _safe_since(reply, lease),
                )
            case "queued":
                position = lease.get("position")
                return Queued(position if isinstance(position, int) else None, str(lease.get("reason") or ""))
            case "draining" | "ended":
                return Over(str(lease.get("end_reason") or lease.get("reason") or "ended"))
        raise self._endpoint.error("its answer is no lease")


def _form(request: Request) -> dict[str, Any]:
    """What is sent; what is not set is left out, so that the server's own default is used."""
    wishes, holder = request.wishes, request.holder
    form = {
        "gpus": wishes.gpus,
        "memory_mb": wishes.memory_mb,
        "model": wishes.model,
        "memory_threshold_percent": wishes.memory_threshold_percent,
        "utilization_threshold_percent": wishes.utilization_threshold_percent,
        "among": wishes.among,
        "priority": request.priority,
        "ttl_s": request.ttl_s,
        "worker_id": holder.worker_id,
        "owner": holder.owner,
        "host": holder.host,
        "pid": holder.pid,
        "pid_started": holder.pid_started,
        "boot_id": holder.boot_id,
        "pid_namespace": holder.pid_namespace,
        "labels": dict(request.labels) or None,
    }
    return {name: value for name, value in form.items() if value is not None}


def _safe_since(reply: Reply, lease: Mapping[str, Any]) -> float | None:
    """Where it was granted by this very call, when that was sent. Else by what is left of its TTL: it was answered after the
    call was sent, so that not more of it had run when that was.
    """
    if reply.status == 201:
        return reply.sent_at
    ttl_s, left_s = lease.get("ttl_s"), lease.get("expires_in_s")
    if not (isinstance(ttl_s, int | float) and isinstance(left_s, int | float) and 0 <= left_s <= ttl_s < inf):
        return None
    return reply.sent_at - (ttl_s - left_s) - ROUNDED_S


def _items(found: Any, needed: str = "id") -> list[dict[str, Any]]:
    if not isinstance(found, list):
        return []
    return [item for item in found if isinstance(item, dict) and isinstance(item.get(needed), str)]


def _gpu(item: Mapping[str, Any]) -> LeasedGpu:
    index = _whole(item.get("gpu_id"))
    return LeasedGpu(-1 if index is None else index, item["uuid"], str(item.get("name") or ""))


def _whole(value: Any) -> int | None:
    """A number that a server may have counted up to; None for everything else it may say."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None
