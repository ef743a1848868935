"""`gpu-pool token`: who may use the server from other machines."""

from __future__ import annotations

import hashlib
import secrets
import shlex
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated

from gpu_worker_pool.cli.declare import Argument, Option
from gpu_worker_pool.cli.options import Endpoints, Json
from gpu_worker_pool.cli.output import complain, out, plain, print_body
from gpu_worker_pool.cli.pools.servers import ServerAnswer, Servers, ask_one, call, failure_of, one_server, read_answer
from gpu_worker_pool.cli.table import make_table, print_table
from gpu_worker_pool.cli.units import count
from gpu_worker_pool.core.model.configured import Role
from gpu_worker_pool.failure import REFUSED, Failure
from gpu_worker_pool.host.addresses import is_every_address, is_this_machine, names_of_this_machine, urls
from gpu_worker_pool.wire.plans import TokenList, TokenView

# The hexadecimal digits of its digest that name a token.
_ID = 12
_TOKENS = "/admin/tokens"
_UNLISTED = "the tokens cannot be listed"


def add_token(
    name: Annotated[str, Argument(metavar="NAME", help="Whose token it is; leases requested with it have this owner.")],
    endpoint: Endpoints = None,
    *,
    role: Annotated[
        Role,
        Option(
            "--role",
            metavar="user|operator|administrator",
            help="Operators also drain GPUs and end leases of others; administrators also set quotas and tokens. [user]",
        ),
    ] = Role.USER,
    note: Annotated[str, Option("--note", metavar="TEXT", help="Where it is used, for `token list`.")] = "",
    json: Json = False,
) -> None:
    """Make a token, and print two lines to paste on the other machine. It takes effect at once. For administrators.

    The token is not shown again: the server keeps only its digest.
    """
    token = secrets.token_urlsafe(24)
    form = {"name": name, "role": role.value, "note": note}
    path = f"{_TOKENS}/{hashlib.sha256(token.encode()).hexdigest()}"

    async def add(servers: Servers) -> tuple[ServerAnswer, str, str | None]:
        answer = await call(servers, path, "PUT", form, what=f"no token was made for {name}")
        return answer, *await _address(servers)

    answer, url, remark = one_server(endpoint).run(add)
    if json:
        print_body({"url": url, "token": token, **answer.data})
        return
    complain(f"send these two lines to {name} (or `gpu-pool login {url}` and the token). The token is not shown again")
    if remark:
        complain(remark)
    out().print(f"export GPU_SERVICE_ENDPOINT={shlex.quote(url)}\nexport GPU_POOL_TOKEN={token}")


def list_tokens(endpoint: Endpoints = None, *, json: Json = False) -> None:
    """List the tokens that are accepted, without the tokens themselves. For administrators."""
    answer = ask_one(endpoint, _TOKENS, what=_UNLISTED)
    if json:
        print_body(answer.data)
        return
    tokens = read_answer(TokenList, answer).tokens
    if not tokens:
        complain("there are no tokens; `gpu-pool token add NAME` makes one")
        return
    table = make_table("NAME", "ROLE", "ID", "ADDED", "BY", "NOTE", whole=("ROLE", "ID", "ADDED"))
    for token in tokens:
        added = "-" if token.added_at is None else token.added_at[:10]
        table.add_row(token.name, token.role, (token.digest or "-")[:_ID], added, token.added_by or "-", token.note)
    print_table(out(), table)


def revoke_token(
    name: Annotated[str, Argument(metavar="NAME|ID", help="All tokens of this name, or the one with this id.")],
    endpoint: Endpoints = None,
) -> int:
    """Revoke tokens. They are refused at once, and calls that wait with one end. For administrators.

    A lease of a holder on another machine ends after its TTL, unless another token of the same owner renews it. To replace
    a token: add the new one, use it, and revoke the old one by its id once what runs with it has ended.
    """

    servers = one_server(endpoint)
    found, failures = servers.run(lambda opened: _revoke(opened, name))
    for failure in failures:
        complain(str(failure))
    if fixed := sum(token.digest is None for token in found):
        complain(f"{count(fixed, 'token')} of {name} in GPU_POOL_TOKENS: remove it there, and restart the server")
    if revoked := len(found) - fixed - len(failures):
        out().print(f"revoked {count(revoked, 'token')} of {found[0].name}")
    return 0 if revoked == len(found) else REFUSED


async def _revoke(servers: Servers, name: str) -> tuple[list[TokenView], list[Failure]]:
    """The tokens that are meant, and what went wrong with some."""
    listed = read_answer(TokenList, await call(servers, _TOKENS, what=_UNLISTED))
    found, failures = _meant(name, listed.tokens), []
    for digest in [token.digest for token in found if token.digest is not None]:
        answer = await servers.ask(servers.ids[0], f"{_TOKENS}/{digest}", "DELETE")
        # One that another administrator has revoked meanwhile is revoked.
        if not answer.is_ok and answer.status != HTTPStatus.NOT_FOUND:
            failures.append(failure_of(answer, f"a token of {name} was not revoked: {plain(answer.error)}"))
    return found, failures


def _meant(name: str, tokens: Sequence[TokenView]) -> list[TokenView]:
    """The tokens of this name, or the one with this id. Failure if there is none, or if it can mean two things."""
    found = [each for each in tokens if name in {each.name, each.digest, (each.digest or "")[:_ID]}]
    if not found:
        raise Failure(f"no token has the name or the id {name!r}; `gpu-pool token list` shows all", REFUSED)
    if any(each.name != name for each in found) and len(found) > 1:
        listed = ", ".join(f"{each.name} ({each.digest or 'of GPU_POOL_TOKENS'})" for each in found)
        raise Failure(f"{name!r} means several tokens: {listed}; give one of these digests. None was revoked", REFUSED)
    return found


async def _address(servers: Servers) -> tuple[str, str | None]:
    """The URL of the server for other machines, and what is to be said of it."""
    endpoint = servers.config.endpoints[servers.ids[0]]
    if not is_this_machine(endpoint.host):
        return endpoint.url, None
    answer = await servers.ask(servers.ids[0], "/config")
    said = answer.data.get("server", {}).get("host") if isinstance(answer.data, dict) else None
    listens_on = said if isinstance(said, str) else "0.0.0.0"  # noqa: S104 - what a server listens on that does not say
    is_alone = not is_every_address(listens_on) and is_this_machine(listens_on)
    everywhere = names_of_this_machine(with_ipv6=":" in listens_on)
    names = everywhere if is_alone or is_every_address(listens_on) else [listens_on]
    if not names:
        return endpoint.url, "this machine has no address except loopback, so other machines cannot reach the server"
    # The host name first: an address may change.
    url = urls(names[0], endpoint.port, endpoint.path, names=())[0]
    if not is_alone:
        return url, None
    only = f"the server listens only on {plain(listens_on)}, so other machines cannot reach it"
    return url, f"{only}; start it with --host 0.0.0.0"
