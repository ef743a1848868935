"""The calls about tokens. A caller sends the digest of a token, so no server ever has the token itself."""

from __future__ import annotations

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.configured import AccessToken, Role
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.server.forms import TokenForm
from gpu_worker_pool.server.http.access import name_of
from gpu_worker_pool.server.http.call import Call
from gpu_worker_pool.server.http.pool_route import ADMIN, WRITING, PoolRouter
from gpu_worker_pool.server.http.problems import Refusal
from gpu_worker_pool.wire.plans import TokenList, TokenView

MAX_TOKENS = 1_000

router = PoolRouter(tags=("leases", "admin"), answered_by="leader", caller=ADMIN)


@router.get("/admin/tokens", problems=WRITING, help="Get the tokens that are accepted (admin)")
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
        (*configured, *map(_view, pool.state.tokens.values())), key=lambda token: (token.name, token.added_at or "")
    )
    return TokenList(server_id=pool.id, tokens=tuple(listed))


@router.put("/admin/tokens/{digest:path}", problems=(409,), help="PUT: accept a token; DELETE: revoke it (admin)")
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
    return _view(pool.state.tokens.get(digest, token))


@router.delete("/admin/tokens/{digest:path}", problems=(404,))
async def revoke_token(call: Call, digest: str) -> TokenList:
    """Revoke a token."""
    call.pool.check_leads()
    if digest not in call.pool.state.tokens:
        raise Refusal(404, "There is no token of this digest; GET /admin/tokens lists all.")
    await call.pool.command(cmd.Configure("tokens", (digest,)))
    return await tokens(call)


def _view(token: AccessToken) -> TokenView:
    return TokenView(
        digest=token.digest,
        name=token.name,
        role=token.role,
        added_at=iso_time(token.added_at),
        added_by=token.added_by,
        note=token.note,
    )
