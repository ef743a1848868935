"""What only the operator may do: take a lease away, take a GPU out of service, leave a process out of the reckoning."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import Field

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import DrainingLease, EndedLease
from gpu_worker_pool.server.authority.snapshot import encode
from gpu_worker_pool.server.http.access import Denied
from gpu_worker_pool.server.http.call import Call, Reply, not_possible
from gpu_worker_pool.server.http.problems import Refused

from .lease_form import PRINTABLE, Form, check_lease_id, parse_form
from .lease_view import ended_view, lease_view
from .leases import LeaseCalls
from .pool_view import slot_view

MAX_NAME = 64
NOT_ADMIN = (
    "Only admin may do this: send the token of the name admin (GPU_POOL_TOKENS). On a server without any tokens, "
    "everybody on its own machine may."
)


class DrainForm(Form):
    """Why a GPU is taken out of service."""

    reason: str = Field("", max_length=200, pattern=PRINTABLE)


class AdminCalls:
    """Answers them."""

    def __init__(self, calls: LeaseCalls, *, prefix: str, node: str) -> None:
        self._calls = calls
        self._driver = calls.authority.driver
        self._node = node
        self._path = f"{prefix}/admin/"

    def find(self, method: str, path: str) -> Callable[[Call], Awaitable[Reply]] | None:
        """What answers this call; None where it is none of these."""
        if not path.startswith(self._path):
            return None
        kind, _, rest = path[len(self._path) :].partition("/")
        target, _, action = rest.rpartition("/")
        match method, kind, action:
            case "POST", "leases", "revoke" if target:
                return lambda call: self.revoke(call, check_lease_id(target))
            case "POST", "gpus", "drain" if target:
                return lambda call: self.drain(call, target)
            case "POST", "gpus", "undrain" if target:
                return lambda call: self.undrain(call, target)
            case "PUT", "ignored-processes", _ if rest:
                return lambda call: self.ignore(call, rest)
            case "DELETE", "ignored-processes", _ if rest:
                return lambda call: self.count(call, rest)
            case _, "leases" | "gpus", "revoke" | "drain" | "undrain" if target:
                return not_possible(method, path, ("POST",))
            case _, "ignored-processes", _ if rest:
                return not_possible(method, path, ("PUT", "DELETE"))
        return None

    async def revoke(self, call: Call, lease_id: str) -> Reply:
        """Take a lease away: its holder hears of it with the next heartbeat."""
        await self._check(call)
        events = await self._driver.do(cmd.Revoke(lease_id))
        if any(isinstance(event, ev.LeaseUnknown) for event in events):
            raise Refused(404, f"There is no lease {lease_id}; /leases lists those there are.")
        lease = await self._driver.find(lease_id)
        ended = lease.ended if isinstance(lease, DrainingLease) else lease
        if isinstance(ended, EndedLease):
            return 200, encode(ended_view(self._driver.state, ended))
        return 200, encode(lease_view(self._driver.state, ended, self._driver.now()) if ended else {})

    async def drain(self, call: Call, gpu: str) -> Reply:
        """No new leases on this GPU; those there run on."""
        body = await self._check(call)
        reason = parse_form(DrainForm, body).reason.strip() or "drained by the operator"
        key = self._key(gpu)
        await self._driver.do(cmd.ExcludeGpu(key, reason))
        return 200, self._gpu(key)

    async def undrain(self, call: Call, gpu: str) -> Reply:
        """Back into service."""
        await self._check(call)
        key = self._key(gpu)
        await self._driver.do(cmd.IncludeGpu(key))
        return 200, self._gpu(key)

    async def ignore(self, call: Call, name: str) -> Reply:
        """Processes of this name do not count as use from outside the pool."""
        await self._check(call)
        await self._driver.do(cmd.IgnoreProcess(_process_name(name)))
        return 200, self._ignored()

    async def count(self, call: Call, name: str) -> Reply:
        """Processes of this name count again."""
        await self._check(call)
        await self._driver.do(cmd.CountProcess(_process_name(name)))
        return 200, self._ignored()

    async def _check(self, call: Call) -> bytes:
        """Whether he may; returns what was sent."""
        if not call.caller().is_admin:
            raise Denied(403, NOT_ADMIN)
        call.query()
        return await call.body()

    def _key(self, gpu: str) -> GpuKey:
        """A GPU by its index or UUID."""
        slots = self._driver.state.slots
        for key, slot in slots.items():
            if gpu == key.uuid or (slot.reading is not None and gpu == str(slot.reading.gpu.index)):
                return key
        if (key := GpuKey(self._node, gpu)) in self._driver.state.excluded:
            return key  # taken out of service, then out of the box
        raise Refused(404, f"There is no GPU {gpu[:80]!r} here; name it by its index or UUID as /pool shows it.")

    def _gpu(self, key: GpuKey) -> bytes:
        slot = self._driver.state.slots.get(key)
        missing: dict[str, Any] = {"node": key.node, "uuid": key.uuid, "state": "unknown"}
        return encode(slot_view(self._driver, slot) if slot is not None else missing)

    def _ignored(self) -> bytes:
        return encode({"ignored_processes": sorted(self._driver.state.ignored_processes)})


def _process_name(name: str) -> str:
    if len(name) > MAX_NAME or not name.isprintable() or not name.strip():
        raise Refused(422, f"A process name has 1 to {MAX_NAME} printable characters, as `ps -o comm` shows it.")
    return name
