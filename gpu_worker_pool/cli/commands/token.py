"""`gpu-pool token`: who may use the server from other machines."""

from __future__ import annotations

import hashlib
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from http import HTTPStatus
from typing import Annotated

from gpu_worker_pool.cli.declare import Argument, Option
from gpu_worker_pool.cli.failure import REFUSED, Failure
from gpu_worker_pool.cli.options import Endpoints, Json
from gpu_worker_pool.cli.output import Text, complain, out, plain, print_json
from gpu_worker_pool.cli.pools.refusals import failure_of
from gpu_worker_pool.cli.pools.servers import ServerAnswer, Servers, nobody_answered
from gpu_worker_pool.cli.table import make_table, print_table
from gpu_worker_pool.core.model.configured import Role
from gpu_worker_pool.host.addresses import is_every_address, is_this_machine, names_of_this_machine, urls
from gpu_worker_pool.wire.reader import read
from gpu_worker_pool.wire.tokens import TokenList, TokenView

# So many hexadecimal digits of its digest name a token.
_ID = 12
_ROLES = {Role.USER: "a user", Role.OPERATOR: "an operator", Role.ADMINISTRATOR: "an administrator"}


def add_token(
    name: Annotated[str, Argument(metavar="NAME", help="Whose it is: the owner of what is requested with it.")],
    endpoint: Endpoints = None,
    *,
    role: Annotated[
        Role,
        Option(
            "--role",
            metavar="user|operator|administrator",
            help="An operator also drains GPUs and ends leases of others; an administrator also sets quotas and tokens.",
        ),
    ] = Role.USER,
    note: Annotated[str, Option("--note", metavar="TEXT", help="Where it is used, for `token list`.")] = "",
    json: Json = False,
) -> int:
    """Make a token, and print the two lines to paste on the other machine. It takes effect at once.

    The token is shown only now: the server keeps its digest. For administrators.
    """
    token = secrets.token_urlsafe(24)
    form = {"name": name, "role": role.value, "note": note}

    async def add(servers: Servers) -> tuple[ServerAnswer, str, str | None]:
        answer = await servers.ask(servers.ids[0], f"/admin/tokens/{_digest(token)}", "PUT", form)
        return answer, *(await _address(servers) if answer.is_ok else ("", None))

    answer, url, remark = _one(endpoint).run(add)
    if not answer.is_ok:
        raise _failure(answer, f"no token was made for {name}: {plain(answer.error)}")
    if json:
        added = read(TokenView, answer.data, clean=plain)
        _print_json([added] if added else [], url, token)
        return 0
    complain(
        f"{name}, {_ROLES[role]}, pastes these two lines (or types the token at `gpu-pool login {url}`); it is shown only now"
    )
    if remark:
        complain(remark)
    out().print(f"export GPU_SERVICE_ENDPOINT={shlex.quote(url)}\nexport GPU_POOL_TOKEN={token}")
    return 0


def list_tokens(endpoint: Endpoints = None, *, json: Json = False) -> int:
    """List the tokens that are accepted, without the tokens themselves. For administrators."""
    servers = _one(endpoint)
    listed = _listed(servers.run(_ask))
    if json:
        _print_json(listed.tokens)
        return 0
    if not listed.tokens:
        complain("there are no tokens; `gpu-pool token add NAME` makes one")
        return 0
    table = make_table("NAME", "ROLE", "ID", "ADDED", "BY", "NOTE", whole=("ROLE", "ID", "ADDED"))
    for token in listed.tokens:
        added = "-" if token.added_at is None else token.added_at[:10]
        table.add_row(
            Text(token.name),
            token.role,
            (token.digest or "-")[:_ID],
            added,
            Text(token.added_by or "-"),
            Text(token.note),
        )
    print_table(out(), table)
    return 0


def revoke_token(
    name: Annotated[str, Argument(metavar="NAME|ID", help="All tokens of this name, or the one with this id.")],
    endpoint: Endpoints = None,
    *,
    json: Json = False,
) -> int:
    """Revoke tokens. They are refused at once, and calls that wait with one end. For administrators.

    A lease of a holder on another machine cannot be renewed with a revoked token: it ends after its TTL, unless another
    token of the same owner renews it. A lease of the server's own machine lasts as long as its process. To change a token:
    add the new one, set it where the old one was, and revoke the old one by its id once what runs with it has ended.
    """

    async def revoke(servers: Servers) -> tuple[list[TokenView], list[ServerAnswer]]:
        found = _meant(name, _listed(await _ask(servers)).tokens)
        paths = [f"/admin/tokens/{token.digest}" for token in found if token.digest is not None]
        return found, [await servers.ask(servers.ids[0], path, "DELETE") for path in paths]

    found, answers = _one(endpoint).run(revoke)
    added = [token for token in found if token.digest is not None]
    # One that another administrator has revoked meanwhile is revoked.
    is_done = [answer.is_ok or answer.status == HTTPStatus.NOT_FOUND for answer in answers]
    for answer, is_revoked in zip(answers, is_done, strict=True):
        if not is_revoked:
            complain(str(_failure(answer, f"a token of {name} was not revoked: {plain(answer.error)}")))
    if kept := len(found) - len(added):
        complain(
            f"{kept} of {name} are from GPU_POOL_TOKENS of the server, which only a change of that setting and a restart revokes"
        )
    revoked = [token for token, is_revoked in zip(added, is_done, strict=True) if is_revoked]
    if json:
        _print_json(revoked)
    elif revoked:
        which = f"{len(revoked)} {'token' if len(revoked) == 1 else 'tokens'}"
        out().print(f"revoked {which} of {found[0].name}")
    return 0 if len(revoked) == len(found) else REFUSED


def _meant(name: str, tokens: Sequence[TokenView]) -> list[TokenView]:
    """The tokens of this name, or the one with this id. Failure if there is none, or if it can mean two things."""
    named = [token for token in tokens if token.name == name]
    by_id = [token for token in tokens if token.digest is not None and name in {token.digest, token.digest[:_ID]}]
    if not named and not by_id:
        raise Failure(f"no token has the name or the id {name!r}; `gpu-pool token list` shows all", REFUSED)
    if len(by_id) > 1 or (named and any(token not in named for token in by_id)):
        listed = ", ".join(
            f"{token.name} ({token.digest or 'of GPU_POOL_TOKENS'})"
            for token in {**dict.fromkeys(named), **dict.fromkeys(by_id)}
        )
        raise Failure(f"{name!r} means several tokens: {listed}; give one of these digests. None was revoked", REFUSED)
    return named or by_id


def _one(endpoint: list[str] | None) -> Servers:
    servers = Servers(endpoint)
    if len(servers.ids) > 1:
        raise Failure(
            f"there are {len(servers.ids)} servers, each with tokens of its own; name one of them with --endpoint. All boxes of "
            "a fleet have the same tokens"
        )
    return servers


async def _ask(servers: Servers) -> ServerAnswer:
    return await servers.ask(servers.ids[0], "/admin/tokens")


def _listed(answer: ServerAnswer) -> TokenList:
    if answer.is_ok and (listed := read(TokenList, answer.data, clean=plain)) is not None:
        return listed
    if answer.status is None:
        raise nobody_answered([answer])
    raise _failure(answer, f"the tokens are not known: {plain(answer.error)}")


def _failure(answer: ServerAnswer, message: str) -> Failure:
    if answer.status == HTTPStatus.NOT_FOUND:
        return Failure(f"{answer.url} has no such call; is it an older or another kind of server?")
    return failure_of(answer, message)


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
        return endpoint.url, "this machine has no address except loopback, so no other machine reaches the server"
    # The host name first: an address may change.
    url = urls(names[0], endpoint.port, endpoint.path, names=())[0]
    if is_alone:
        return (
            url,
            f"the server listens on {plain(listens_on)} alone, so no other machine reaches it; start it with --host 0.0.0.0",
        )
    return url, None


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _print_json(tokens: Sequence[TokenView], url: str | None = None, secret: str | None = None) -> None:
    shown = [{"id": (token.digest or "")[:_ID] or None, **asdict(token)} for token in tokens]
    print_json("token", {"url": url, "token": secret, "tokens": shown})
