"""The calls of the operator: revoke a lease, drain a GPU, ignore a process."""

from __future__ import annotations

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import Booking
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.encoding import encode
from gpu_worker_pool.server.http.access import Caller, Denied, name_of
from gpu_worker_pool.server.http.call import Call, Handlers
from gpu_worker_pool.server.http.problems import Refusal
from gpu_worker_pool.server.http.response import Response
from gpu_worker_pool.server.views.gpu_view import gpu_view
from gpu_worker_pool.server.views.lease_view import outcome_view
from gpu_worker_pool.wire.bounds import MAX_PROCESS_NAME, is_printable
from gpu_worker_pool.wire.forms import DrainForm
from gpu_worker_pool.wire.pool import IgnoredProcesses, MissingGpu
from gpu_worker_pool.wire.routes import REASON, Parameter
from gpu_worker_pool.wire.strict import check_lease_id, parse_form

from .times import read_time

# A date that is no more than this in the past is now: the caller's clock may be behind.
CLOCKS_DIFFER_S = 60.0
# How the id of a planned drain begins.
DRAIN_PREFIX = "drain-"


class AdminCalls:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def handlers(self) -> Handlers:
        return {
            "revoke_lease": self.revoke,
            "drain_gpu": self.drain,
            "undrain_gpu": self.undrain,
            "ignore_process": self.ignore,
            "count_process": self.count,
        }

    async def revoke(self, call: Call) -> Response:
        lease_id = check_lease_id(call.parameters["lease_id"])
        await check_operator(call, REASON)
        is_known = await self._pool.revoke(lease_id, by=name_of(call.caller()), why=call.query(REASON)["reason"])
        lease = await self._pool.find(lease_id)
        if not is_known or lease is None:
            raise Refusal(404, f"There is no lease {lease_id}; /leases lists all live leases.")
        return Response(200, encode(outcome_view(self._pool, lease)))

    async def drain(self, call: Call) -> Response:
        form = parse_form(DrainForm, await check_operator(call))
        key = self._key(call)
        reason = form.reason.strip() or "drained by the operator"
        starts_at, now = read_time("at", form.at), self._pool.wall_now()
        if starts_at is not None and starts_at < now - CLOCKS_DIFFER_S:
            raise Refusal(422, f"at: {iso_time(starts_at)} is in the past; leave it out to drain now.")
        if starts_at is None or starts_at <= now:
            await self._pool.command(cmd.Configure("excluded", key, reason))
            return self._gpu(key)
        booking = Booking(_drain_id(key), (key,), starts_at, None, None, reason, name_of(call.caller()))
        for event in await self._pool.command(cmd.BookGpus(booking, Wishes())):
            if isinstance(event, ev.Refused):
                raise Refusal(422, f"This cannot be planned: {event.why}.")
        return self._gpu(key)

    async def undrain(self, call: Call) -> Response:
        await check_operator(call)
        key = self._key(call)
        if _drain_id(key) in self._pool.state.bookings:
            await self._pool.command(cmd.Configure("bookings", (_drain_id(key),)))
        await self._pool.command(cmd.Configure("excluded", key))
        return self._gpu(key)

    async def ignore(self, call: Call) -> Response:
        return await self._set_ignored(call, name_of(call.caller()))

    async def count(self, call: Call) -> Response:
        return await self._set_ignored(call, None)

    async def _set_ignored(self, call: Call, by: str | None) -> Response:
        await check_operator(call)
        await self._pool.command(cmd.Configure("ignored_processes", (_process_name(call),), by))
        names = tuple(sorted(self._pool.state.ignored_processes))
        return Response(200, encode(IgnoredProcesses(ignored_processes=names)))

    def _key(self, call: Call) -> GpuKey:
        """The GPU that a call names by its index or UUID; in a whole fleet, after the node and a colon."""
        self._pool.check_leads()
        state, gpu, node = self._pool.state, call.parameters["gpu"], call.target.node
        if call.target.is_fleet:
            node, colon, gpu = gpu.rpartition(":")
            if not colon:
                raise Refusal(404, f"{gpu[:80]!r} does not name a node; write node:GPU, as in gpu-01:0.")
        for slot in state.slots_on(node):
            # A box that is away has no readings; its inventory has the index.
            if gpu == slot.key.uuid or (slot.gpu is not None and gpu == str(slot.gpu.index)):
                return slot.key
        if (key := GpuKey(node or self._pool.node, gpu)) in state.excluded:
            return key  # drained, then removed from the box
        where = f"on {node[:80]!r}" if call.target.is_fleet and node else "here"
        raise Refusal(404, f"There is no GPU {gpu[:80]!r} {where}; name it by its index or UUID as /pool shows it.")

    def _gpu(self, key: GpuKey) -> Response:
        slot = self._pool.state.slots.get(key)
        view = MissingGpu(node=key.node, uuid=key.uuid) if slot is None else gpu_view(self._pool, slot)
        return Response(200, encode(view))


def _drain_id(key: GpuKey) -> str:
    """The id of the booking that takes a GPU out of service later. There is one for a GPU."""
    return f"{DRAIN_PREFIX}{key.uuid}"


async def check_admin(call: Call, *known: Parameter) -> bytes:
    """Check that the caller is an administrator, and return the body; Denied otherwise."""
    caller = call.caller()
    if not caller.is_admin:
        raise _denied(caller, "an administrator", call.rules.administrators)
    call.query(*known)
    return await call.body()


async def check_operator(call: Call, *known: Parameter) -> bytes:
    """As check_admin, for operators, whom administrators are among."""
    caller = call.caller()
    if not caller.is_operator:
        raise _denied(caller, "an operator or an administrator", call.rules.operators)
    call.query(*known)
    return await call.body()


def _denied(caller: Caller, wanted: str, local: str) -> Denied:
    you = "" if caller.name is None else f" You are {caller.name}, in the role of {caller.role}."
    return Denied(
        403,
        f"Only {wanted} may do this: on the server's machine {local}, and from everywhere a caller with a token of that "
        f"role (gpu-pool token add NAME --role ROLE).{you}",
    )


def _process_name(call: Call) -> str:
    name = call.parameters["name"]
    # A server decodes bytes of the path that are not UTF-8 to a character that no process has in its name.
    is_text = "\N{REPLACEMENT CHARACTER}" not in name
    if len(name) > MAX_PROCESS_NAME or not is_text or not is_printable(name) or not name.strip():
        raise Refusal(
            422, f"The process name must be 1 to {MAX_PROCESS_NAME} printable characters, as `ps -o comm` shows them."
        )
    return name
