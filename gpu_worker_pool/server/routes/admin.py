"""The calls of operators: revoke a lease, drain a GPU, ignore a process; and of administrators: tokens.

A caller sends the digest of a token, so no server ever has the token itself.
"""

from __future__ import annotations

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import AccessToken, Booking, Role
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import EndReason
from gpu_worker_pool.core.model.request import Wishes
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.encoding import shared_fields
from gpu_worker_pool.server.forms import DrainForm, TokenForm
from gpu_worker_pool.server.http.access import name_of
from gpu_worker_pool.server.http.call import Call
from gpu_worker_pool.server.http.pool_route import ADMIN, OPERATOR, WRITING, PoolRouter
from gpu_worker_pool.server.http.response import Refusal
from gpu_worker_pool.server.parameters import LeaseId, ProcessName, ReasonWords
from gpu_worker_pool.server.views.lease_view import outcome_view
from gpu_worker_pool.server.views.pool_view import gpu_view
from gpu_worker_pool.wire.leases import AnyLease
from gpu_worker_pool.wire.plans import TokenList, TokenView
from gpu_worker_pool.wire.pool import IgnoredProcesses, MissingGpu, PoolGpu

# A date that is no more than this in the past is now: the caller's clock may be behind.
CLOCKS_DIFFER_S = 60.0
# How the id of a planned drain begins.
DRAIN_PREFIX = "drain-"
NOW = DrainForm()
MAX_TOKENS = 1_000

router = PoolRouter(tags=("leases", "admin"), answered_by="leader", caller=OPERATOR)


@router.post("/admin/leases/{lease_id:path}/revoke", problems=(404,), help="POST: revoke a lease (admin)")
async def revoke_lease(call: Call, lease_id: LeaseId, reason: ReasonWords = None) -> AnyLease:
    """Revoke a lease."""
    revoke = cmd.EndLease(lease_id, EndReason.REVOKED, name_of(call.caller()), reason)
    events, lease = await call.pool.command(revoke), await call.pool.find(lease_id)
    if lease is None or any(isinstance(event, ev.Refused) for event in events):
        raise Refusal(404, f"There is no lease {lease_id}; /leases lists all live leases.")
    return outcome_view(call.pool, lease)


@router.post("/admin/gpus/{gpu:path}/drain", problems=(404,), help="POST: take a GPU out of service (admin)")
async def drain_gpu(call: Call, gpu: str, form: DrainForm = NOW) -> PoolGpu | MissingGpu:
    """Take a GPU out of service."""
    pool, key = call.pool, _key(call, gpu)
    reason = form.reason.strip() or "drained by the operator"
    starts_at, now = form.at, pool.wall_now()
    if starts_at is not None and starts_at < now - CLOCKS_DIFFER_S:
        raise Refusal(422, f"at: {iso_time(starts_at)} is in the past; leave it out to drain now.")
    if starts_at is None or starts_at <= now:
        await pool.command(cmd.Configure("excluded", key, reason))
        return _gpu(pool, key)
    booking = Booking(_drain_id(key), (key,), starts_at, None, None, reason, name_of(call.caller()))
    for event in await pool.command(cmd.BookGpus(booking, Wishes())):
        if isinstance(event, ev.Refused):
            raise Refusal(422, f"This cannot be planned: {event.why}.")
    return _gpu(pool, key)


@router.post("/admin/gpus/{gpu:path}/undrain", problems=(404,), help="POST: put a GPU back into service (admin)")
async def undrain_gpu(call: Call, gpu: str) -> PoolGpu | MissingGpu:
    """Put a GPU back into service."""
    pool, key = call.pool, _key(call, gpu)
    if _drain_id(key) in pool.state.bookings:
        await pool.command(cmd.Configure("bookings", (_drain_id(key),)))
    await pool.command(cmd.Configure("excluded", key))
    return _gpu(pool, key)


@router.put(
    "/admin/ignored-processes/{name:path}",
    help="PUT: ignore processes of a name; DELETE: count them again (admin)",
)
async def ignore_process(call: Call, name: ProcessName) -> IgnoredProcesses:
    """Ignore processes of this name."""
    return await _set_ignored(call.pool, name, name_of(call.caller()))


@router.delete("/admin/ignored-processes/{name:path}")
async def count_process(call: Call, name: ProcessName) -> IgnoredProcesses:
    """Count processes of this name again."""
    return await _set_ignored(call.pool, name, None)


async def _set_ignored(pool: Pool, name: str, by: str | None) -> IgnoredProcesses:
    await pool.command(cmd.Configure("ignored_processes", (name,), by))
    return IgnoredProcesses(ignored_processes=tuple(sorted(pool.state.ignored_processes)))


def _key(call: Call, gpu: str) -> GpuKey:
    """The GPU that a call names by its index or UUID; in a whole fleet, after the node and a colon."""
    call.pool.check_leads()
    state, node = call.pool.state, call.target.node
    if call.target.is_fleet:
        node, colon, gpu = gpu.rpartition(":")
        if not colon:
            raise Refusal(404, f"{gpu[:80]!r} does not name a node; write node:GPU, as in gpu-01:0.")
    for slot in state.slots_on(node):
        # A box that is away has no readings; its inventory has the index.
        if gpu == slot.key.uuid or (slot.gpu is not None and gpu == str(slot.gpu.index)):
            return slot.key
    if (key := GpuKey(node or call.pool.node, gpu)) in state.excluded:
        return key  # drained, then removed from the box
    where = f"on {node[:80]!r}" if call.target.is_fleet and node else "here"
    raise Refusal(404, f"There is no GPU {gpu[:80]!r} {where}; name it by its index or UUID as /pool shows it.")


def _gpu(pool: Pool, key: GpuKey) -> PoolGpu | MissingGpu:
    slot = pool.state.slots.get(key)
    return MissingGpu(node=key.node, uuid=key.uuid) if slot is None else gpu_view(pool, slot)


def _drain_id(key: GpuKey) -> str:
    """The id of the booking that takes a GPU out of service later. There is one for a GPU."""
    return f"{DRAIN_PREFIX}{key.uuid}"


@router.get("/admin/tokens", caller=ADMIN, problems=WRITING, help="Get the tokens that are accepted (admin)")
async def tokens(call: Call) -> TokenList:
    """All tokens that are accepted."""
    pool = call.pool
    pool.check_is_open()
    await pool.caught_up()
    configured = [
        TokenView(digest=None, name=name, role=role, note="of GPU_POOL_TOKENS")
        for name, role in call.rules.tokens.configured()
    ]
    listed = sorted(
        (*configured, *map(_token_view, pool.state.tokens.values())),
        key=lambda token: (token.name, token.added_at or ""),
    )
    return TokenList(server_id=pool.id, tokens=tuple(listed))


@router.put(
    "/admin/tokens/{digest:path}", caller=ADMIN, problems=(409,), help="PUT: accept a token; DELETE: revoke it (admin)"
)
async def add_token(call: Call, digest: str, form: TokenForm) -> TokenView:
    """Accept the token of this digest."""
    pool = call.pool
    pool.check_leads()
    known = pool.state.tokens.get(digest)
    if known is not None and known.name != form.name:
        raise Refusal(409, f"This token is {known.name}'s; make another one for {form.name[:80]!r}.")
    if known is None and len(pool.state.tokens) >= MAX_TOKENS:
        raise Refusal(422, f"There are {MAX_TOKENS} tokens already, which is the limit; revoke one of them first.")
    try:
        token = AccessToken(digest, form.name, Role(form.role), pool.wall_now(), name_of(call.caller()), form.note)
    except ValueError as error:
        raise Refusal(422, f"{error}.") from None
    await pool.command(cmd.Configure("tokens", (digest,), token))
    return _token_view(pool.state.tokens.get(digest, token))


@router.delete("/admin/tokens/{digest:path}", caller=ADMIN, problems=(404,))
async def revoke_token(call: Call, digest: str) -> TokenList:
    """Revoke a token."""
    call.pool.check_leads()
    if digest not in call.pool.state.tokens:
        raise Refusal(404, "There is no token of this digest; GET /admin/tokens lists all.")
    await call.pool.command(cmd.Configure("tokens", (digest,)))
    return await tokens(call)


def _token_view(token: AccessToken) -> TokenView:
    return TokenView(**{**shared_fields(TokenView, token), "added_at": iso_time(token.added_at)})
