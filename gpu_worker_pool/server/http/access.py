"""Access control: decides by where a call comes from, whose it is, its headers and the tokens only."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from ipaddress import IPv6Address, ip_address
from math import ceil
from typing import Any, Self

from starlette.types import Scope

from gpu_worker_pool.core.model.configured import Role
from gpu_worker_pool.host.connections import (
    Address,
    UserNotKnown,
    can_tell_users,
    uid_of_tcp_peer,
    uid_of_unix_peer,
)
from gpu_worker_pool.host.users import User, UserNotLookedUp
from gpu_worker_pool.server.http.tokens import Guesses

from .response import RETRY_AFTER, Refusal
from .tokens import Tokens, digest_of

CHALLENGE = 'Bearer realm="gpu-worker-pool"'

BEARER = re.compile(r"bearer +([!-~]+)", re.IGNORECASE)
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{0,5}))?", re.IGNORECASE)
ORIGIN = re.compile(r"(https?)://(.+)", re.IGNORECASE)
DEFAULT_PORTS = {"http": "80", "https": "443"}

PROXY_HEADERS = frozenset({"forwarded", "via", "x-real-ip", "x-client-ip", "cf-connecting-ip", "true-client-ip"})
PROXY_PREFIX = "x-forwarded"
HOW_TO_PROVE_IT = (
    'send "Authorization: Bearer" with a token, which its administrator makes by `gpu-pool token add NAME`'
)


class Denied(Refusal):
    """The caller may not do this, or not now. The detail says what would help. The answer to a wrong token is held back for
    `hold_s`, so that guessing takes long.
    """

    def __init__(
        self, status: int, detail: str, headers: Mapping[str, str] | None = None, *, hold_s: float = 0.0
    ) -> None:
        challenge = {"WWW-Authenticate": CHALLENGE} if status == 401 else {}
        super().__init__(status, detail, challenge if headers is None else headers)
        self.hold_s = hold_s


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller that may write: by a token, which proves its name, or because it is on this machine.

    A local caller has the name of its Unix user; None where the platform cannot tell users.
    """

    name: str | None = None
    is_local: bool = False
    role: Role = Role.USER

    @property
    def is_admin(self) -> bool:
        return self.role is Role.ADMINISTRATOR

    @property
    def is_operator(self) -> bool:
        """Whether it may look after GPUs and leases of others. An administrator may, too."""
        return self.role is not Role.USER


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a call comes from: the server's Unix socket, or the TCP address `host`.

    `find_user` is called only if the answer matters. It returns None where the platform cannot tell users, and raises
    UserNotKnown where this one cannot be told.
    """

    host: str | None
    is_unix: bool = False
    find_user: Callable[[], User | None] = lambda: None


@dataclass(slots=True)
class AccessRules:
    """What the operator has set. `takes_loopback`: local callers may come by TCP. `socket` is the path of the server's
    Unix socket, if it has one; `administrators` and `operators` name them in words.
    """

    tokens: Tokens = field(default_factory=Tokens)
    takes_loopback: bool = True
    socket: str | None = None
    administrators: str = "root"
    operators: str = "root"
    guesses: Guesses = field(default_factory=Guesses)


def identify(origin: Origin, headers: Mapping[str, str], rules: AccessRules) -> Caller:
    """Identify the caller of a writing call; Denied if it may not write. The headers' names are in lower case."""
    tokens = rules.tokens
    refuse_other_sites(headers)
    authorization = headers.get("authorization")
    if authorization is not None:
        # Never taken as an anonymous call: a caller with a stale token must learn of it, also on this machine.
        return caller_by_digest(digest_in(authorization), rules, origin.host)
    _refuse_unless_local(origin, headers)
    how = f"call by its Unix socket {rules.socket}, or {HOW_TO_PROVE_IT}" if rules.socket else HOW_TO_PROVE_IT
    if not origin.is_unix and not rules.takes_loopback:
        raise Denied(401, f"This server accepts local callers only at its Unix socket (GPU_POOL_LOCAL=socket); {how}.")
    try:
        user = origin.find_user()
    except UserNotLookedUp as unknown:
        detail = f"The server cannot tell yet which user calls: {unknown}; ask again, or send a token."
        raise Denied(503, detail, RETRY_AFTER) from None
    except UserNotKnown as unknown:
        raise Denied(401, f"The server cannot tell which user of its machine calls: {unknown}; {how}.") from None
    if user is None:
        return Caller(is_local=True, role=Role.ADMINISTRATOR if tokens.is_unset else Role.USER)
    return Caller(user.name, is_local=True, role=user.role)


def caller_by_digest(digest: str, rules: AccessRules, host: str | None) -> Caller:
    """The caller at the address `host` with the token of this digest; Denied if that is not known."""
    tokens, wait_s = rules.tokens, rules.guesses.must_wait_s(host, digest)
    if wait_s is not None:
        raise Denied(
            429,
            "Too many wrong tokens came from your address, so yours was not checked; send it again in "
            f"{ceil(wait_s)} s. Tokens that were right from there before are accepted meanwhile.",
            {"Retry-After": f"{ceil(wait_s)}"},
        )
    proven = tokens.find_digest(digest)
    if proven is not None:
        rules.guesses.note_right(host, digest)
        return Caller(name=proven.name, role=proven.role)
    if tokens.is_broken:
        detail = "This server's GPU_POOL_TOKENS cannot be read, so none of them is accepted; its log says why."
    elif tokens.is_unset:
        detail = (
            "This token is not known, or was revoked: the server has no tokens now. Its administrator makes one by "
            "`gpu-pool token add NAME`. Calls from its own machine need none."
        )
    else:
        detail = "This token is not known, or no longer valid; ask the administrator of this server for a new one."
    invalid = {"WWW-Authenticate": f'{CHALLENGE}, error="invalid_token"'}
    raise Denied(401, detail, invalid, hold_s=rules.guesses.note_wrong(host, digest))


def digest_in(authorization: str) -> str:
    """The digest of the token of an Authorization header; Denied if the header is not as it must be."""
    bearer = BEARER.fullmatch(authorization.strip())
    if bearer is None:
        raise Denied(401, "The Authorization header must read: Bearer, a space, and one token.")
    return digest_of(bearer[1])


def owner_for(caller: Caller, claimed: str | None, tokens: Tokens) -> str | None:
    """The owner of a new lease: the proven name. An administrator may request one for another owner."""
    owner = (claimed or "").strip() or None
    if caller.name is not None:
        # Programs name the Unix user of their own machine; a token that is not an administrator's outweighs that.
        if owner is None or not (caller.is_local or caller.is_admin):
            return caller.name
        if owner != caller.name and not caller.is_admin:
            raise Denied(
                403,
                f"The owner of a lease is the user who requests it, here {caller.name}, not {owner}; leave owner out. "
                "Only an administrator may request a lease for another user.",
            )
        return owner
    if owner is not None and tokens.is_broken:
        raise Denied(
            403,
            "This server's tokens cannot be read, so no owner can be checked; leave owner out, or ask the operator.",
        )
    if owner in tokens.names:
        raise Denied(403, f"The owner {owner} has a token; send that token, or leave owner out.")
    return owner


def may_manage(caller: Caller, owner: str | None, tokens: Tokens) -> bool:
    """Whether the caller may renew or release a lease of this owner."""
    if caller.is_operator:
        return True
    if owner is None:
        return caller.is_local  # of a server that could not tell users
    if caller.name is not None:
        return caller.name == owner
    # Without the user's name, every owner without a token is taken for the caller. Broken tokens may have any name.
    return caller.is_local and not tokens.is_broken and owner not in tokens.names


def name_of(caller: Caller) -> str:
    """The caller, as others are told of it."""
    return caller.name or "a caller on this machine"


@lru_cache(maxsize=1024)
def is_loopback(host: str | None) -> bool:
    """Whether an address is a loopback address. A missing address proves nothing: the family of the socket does."""
    try:
        address = ip_address(host or "")
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback


def proxy_header(headers: Mapping[str, str]) -> str | None:
    """The header that shows that a proxy passed the call on; None if there is none."""
    return next((name for name in headers if name in PROXY_HEADERS or name.startswith(PROXY_PREFIX)), None)


def merge_headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """ASGI headers by lower-case name. Repeated headers are joined, so that a second Host does not hide the first."""
    merged: dict[str, str] = {}
    for raw_name, raw_value in raw:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        merged[name] = f"{merged[name]}, {value}" if name in merged else value
    return merged


def refuse_other_sites(headers: Mapping[str, str]) -> None:
    """Refuse pages of another origin, with a token or without."""
    site = headers.get("sec-fetch-site")
    if site is not None and site.strip().lower() not in {"same-origin", "none"}:
        raise Denied(403, "A page of another origin may read here but not change anything (Sec-Fetch-Site).")
    origin = headers.get("origin")
    if origin is not None and not _is_same_origin(origin, headers.get("host", "")):
        raise Denied(
            403,
            "A page of another origin may read here but not change anything: Origin and Host differ. "
            "A proxy in between must pass the Host header on.",
        )


def _refuse_unless_local(origin: Origin, headers: Mapping[str, str]) -> None:
    if not origin.is_unix and not is_loopback(origin.host):
        raise Denied(
            401, f"Without a token, only calls from the server's own machine may change anything; {HOW_TO_PROVE_IT}."
        )
    passed_on = proxy_header(headers)
    if passed_on is not None:
        raise Denied(
            401,
            f"This call came through a proxy ({_shown(passed_on)}), so it does not count as local; {HOW_TO_PROVE_IT}.",
        )
    if origin.is_unix:
        return  # which no web page reaches
    if not _names_loopback(headers.get("host", "")):
        # The address is local and the name is not: that is how a web page reaches a foreign server (DNS rebinding).
        raise Denied(
            403,
            f"Without a token, the Host must be localhost, 127.0.0.1 or [::1]; use one of these, or {HOW_TO_PROVE_IT}.",
        )


def _is_same_origin(origin: str, host: str) -> bool:
    parts = ORIGIN.fullmatch(origin.strip())
    if parts is None:  # also "null": a sandboxed page or a file
        return False
    theirs, ours = _host_and_port(parts[2]), _host_and_port(host)
    if theirs is None or ours is None:
        return False
    default = DEFAULT_PORTS[parts[1].lower()]
    return (theirs[0], theirs[1] or default) == (ours[0], ours[1] or default)


def _host_and_port(text: str) -> tuple[str, str] | None:
    parts = HOST.fullmatch(text.strip())
    return None if parts is None else (parts[1].lower().removesuffix("."), parts[2] or "")


@lru_cache(maxsize=256)
def _names_loopback(text: str) -> bool:
    """Whether a Host header names this machine by a loopback address or name."""
    named = _host_and_port(text)
    if named is None:
        return False
    host, _ = named
    if host.startswith("["):
        return is_loopback(host.strip("[]"))
    return host == "localhost" or host.endswith(".localhost") or is_loopback(host)


def _shown(header: str) -> str:
    # The caller chooses a header's name; the answer must be able to carry it.
    return header[:40].encode("ascii", "backslashreplace").decode()


# The key under which `BoundedProtocol` puts the connection into the scope of each call.
CONNECTION = "gpu_pool.connection"


class Connection:
    """`peer` and `own` are the addresses of its ends; a Unix socket has none. `connected` is our end, where it is known."""

    def __init__(self, peer: Address | None, own: Address | None, connected: socket.socket | None = None) -> None:
        self._peer = peer
        self._own = own
        self._connected = connected

    @classmethod
    def of_transport(cls, transport: asyncio.Transport) -> Self:
        connected: socket.socket | None = transport.get_extra_info("socket")
        return cls(
            _address(transport.get_extra_info("peername")), _address(transport.get_extra_info("sockname")), connected
        )

    @classmethod
    def of_scope(cls, scope: Scope) -> Connection:
        """The connection of a call. Without our protocol, only its addresses are known."""
        known: Connection | None = scope.get(CONNECTION)
        return known or cls(_address(scope.get("client")), _address(scope.get("server")))

    @property
    def host(self) -> str | None:
        return None if self._peer is None else self._peer[0]

    @cached_property
    def is_unix(self) -> bool:
        """Whether it came by the server's Unix socket: its family decides. A missing address proves nothing."""
        return self._connected is not None and self._connected.family == socket.AF_UNIX

    @cached_property
    def uid(self) -> int | None:
        """The user at the other end, on this machine; None where the platform cannot tell users. UserNotKnown if the
        kernel does not say. It is looked up once, and only if it is asked for.
        """
        if not can_tell_users():
            return None
        if self.is_unix and self._connected is not None:
            return uid_of_unix_peer(self._connected)
        if self._peer is None or self._own is None:
            raise UserNotKnown("the addresses of this connection are not known")
        return uid_of_tcp_peer(self._peer, self._own, self._connected)


def _address(found: Any) -> Address | None:
    if isinstance(found, tuple | list) and len(found) >= 2 and isinstance(found[1], int):
        return str(found[0]), found[1]
    return None
