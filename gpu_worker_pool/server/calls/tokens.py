"""The calls about tokens. A caller sends the digest of a token, so no server ever has the token itself."""

from __future__ import annotations

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.configured import AccessToken, Role
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.encoding import encode
from gpu_worker_pool.server.http.access import name_of
from gpu_worker_pool.server.http.call import Call, Handlers
from gpu_worker_pool.server.http.problems import Refusal
from gpu_worker_pool.server.http.response import Response
from gpu_worker_pool.server.http.tokens import Tokens
from gpu_worker_pool.wire.strict import parse_form
from gpu_worker_pool.wire.tokens import TokenForm, TokenList, TokenView

from .admin import check_admin

# Each call with a token is compared with all of them.
MAX_TOKENS = 1_000


class TokenCalls:
    def __init__(self, pool: Pool, tokens: Tokens) -> None:
        self._pool = pool
        self._tokens = tokens

    def handlers(self) -> Handlers:
        return {"tokens": self.show, "add_token": self.add, "revoke_token": self.revoke}

    async def show(self, call: Call) -> Response:
        await check_admin(call)
        return await self._listed()

    async def add(self, call: Call) -> Response:
        form = parse_form(TokenForm, await check_admin(call))
        digest = call.parameters["digest"]
        self._pool.check_leads()
        known = self._pool.state.tokens.get(digest)
        if known is not None and known.name != form.name:
            raise Refusal(409, f"This token is {known.name}'s; make another one for {form.name[:80]!r}.")
        if known is None and len(self._pool.state.tokens) >= MAX_TOKENS:
            raise Refusal(422, f"There are {MAX_TOKENS} tokens already, which is the limit; revoke one of them first.")
        try:
            role = Role(form.role)
        except ValueError:
            raise Refusal(422, f"role is {form.role[:80]!r}; it must be {', '.join(Role)}.") from None
        try:
            token = AccessToken(digest, form.name, role, self._pool.wall_now(), name_of(call.caller()), form.note)
        except ValueError as error:
            raise Refusal(422, f"{error}.") from None
        await self._pool.command(cmd.Configure("tokens", (digest,), token))
        return Response(200, encode(_view(self._pool.state.tokens.get(digest, token))))

    async def revoke(self, call: Call) -> Response:
        await check_admin(call)
        digest = call.parameters["digest"]
        self._pool.check_leads()
        if digest not in self._pool.state.tokens:
            raise Refusal(404, "There is no token of this digest; GET /admin/tokens lists all.")
        await self._pool.command(cmd.Configure("tokens", (digest,)))
        return await self._listed()

    async def _listed(self) -> Response:
        self._pool.check_is_open()
        await self._pool.caught_up()
        added = [_view(token) for token in self._pool.state.tokens.values()]
        configured = [
            TokenView(digest=None, name=name, role=role, note="of GPU_POOL_TOKENS")
            for name, role in self._tokens.configured()
        ]
        listed = sorted((*configured, *added), key=lambda token: (token.name, token.added_at or ""))
        return Response(200, encode(TokenList(server_id=self._pool.id, tokens=tuple(listed))))


def _view(token: AccessToken) -> TokenView:
    return TokenView(
        digest=token.digest,
        name=token.name,
        role=token.role,
        added_at=iso_time(token.added_at),
        added_by=token.added_by,
        note=token.note,
    )
