"""A call as its handler sees it: the caller, its address, the query and the body."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope

from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.host.connections import UserNotKnown
from gpu_worker_pool.host.users import User, Users
from gpu_worker_pool.wire.bounds import is_printable
from gpu_worker_pool.wire.routes import Parameter
from gpu_worker_pool.wire.strict import FormT, parse_form

from .access import (
    AccessRules,
    Caller,
    Denied,
    Origin,
    caller_by_token,
    identify,
    is_loopback,
    proxy_header,
    refuse_other_sites,
    token_in,
)
from .bodies import read_body
from .connection import Connection
from .exchange import EXCHANGE, Exchange
from .forwarded import Forwarded
from .known_heads import KNOWN_CALL, KnownCall, KnownHead
from .problems import Refusal
from .response import Response
from .scope import EVERYTHING
from .time_limits import TimeLimits

MAX_PARAMETERS = 20


class Call:
    """One request. `parameters` are those in its path."""

    def __init__(
        self, scope: Scope, receive: Receive, rules: AccessRules, users: Users, limits: TimeLimits | None = None
    ) -> None:
        self.scope = scope
        self.receive = receive
        self._known: KnownCall | None = scope.get(KNOWN_CALL)
        self.parameters: Mapping[str, str] = {} if self._known is None else {"lease_id": self._known.lease_id}
        self.rules = rules
        self._users = users
        self._limits = limits
        self._connection = Connection.of_scope(scope)
        # What the call means, and what the box says that passed it on, if one did.
        self.view_scope = EVERYTHING
        self.forwarded: Forwarded | None = None
        # The token by which the caller was identified.
        self._token: str | None = None

    @cached_property
    def headers(self) -> Mapping[str, str]:
        if self._known is not None:
            return self._known.head.headers
        return self._connection.headers_of(self.scope["headers"])

    @property
    def scope_node(self) -> str | None:
        """The node that the call means; None for all."""
        return self.view_scope.node

    @property
    def node(self) -> str | None:
        """The box by which the call came, if that is not this one."""
        return None if self.forwarded is None else self.forwarded.node

    def caller(self) -> Caller:
        """The caller of a writing call; Denied if it may not write."""
        if self._known is not None:
            return self._caller_by_head(self._known.head)
        authorization = self.headers.get("authorization")
        if self.forwarded is not None:
            if (known := self.forwarded.identified()) is not None:
                return known
            caller = caller_by_token(authorization or "", self.rules, self._host)
        else:
            caller = identify(self._origin, self.headers, self.rules)
        self._token = None if authorization is None else token_in(authorization)
        return caller

    def _caller_by_head(self, head: KnownHead) -> Caller:
        """The caller of a known head, which has no token. With the same user it is the same as before."""
        if head.local is not None and head.local[0] is self._find_user():
            return head.local[1]
        caller = identify(self._origin, head.headers, self.rules)
        user = self._find_user()
        head.local = None if user is None else (user, caller)
        return caller

    @property
    def _origin(self) -> Origin:
        return Origin(self._connection.host, self._connection.is_unix, self._find_user)

    def caller_or_none(self) -> Caller | None:
        try:
            return self.caller()
        except Denied:
            return None

    def turn_name(self, caller: Caller) -> str:
        """The name under which this caller takes turns with others: its own, or its address where it has none."""
        return caller.name or self._host

    @property
    def reader_name(self) -> str:
        """The same for a call that need not say whose it is: by its token, else by its Unix user, else by its address."""
        caller = self.caller_or_none() if "authorization" in self.headers else None
        if caller is not None and caller.name is not None:
            return caller.name
        if self.uid is None:
            return self._host
        return f"uid {self.uid}" if self.node is None else f"uid {self.uid} of {self.node}"

    @property
    def _host(self) -> str:
        """Where the caller is, as far as that is known."""
        if self.forwarded is not None:
            return f"{self.forwarded.host or ''} by {self.forwarded.node}"
        return self._connection.host or ""

    @property
    def is_loopback(self) -> bool:
        """Whether the call came directly from this machine, without a proxy."""
        if self.forwarded is not None:
            return False  # it was another machine
        if self._known is not None and self._known.head.local is not None:
            return True
        is_here = self._connection.is_unix or is_loopback(self._connection.host)
        return is_here and proxy_header(self.headers) is None

    @property
    def uid(self) -> int | None:
        """The Unix user of a caller on the box that was asked; None if the caller is elsewhere, or the user is not known.

        With GPU_POOL_LOCAL=socket, loopback is elsewhere: a forwarder may be at the other end.
        """
        if self.forwarded is not None:
            return self.forwarded.uid
        if not (self._connection.is_unix or self.rules.takes_loopback):
            return None
        try:
            return self._connection.uid if self.is_loopback else None
        except UserNotKnown:
            return None

    def forwarded_by(
        self, node: str, key: str, process: ProcessId | None = None, no_process: tuple[int, str] | None = None
    ) -> Forwarded:
        """What this box says of the call when it passes it on."""
        caller, denied = None, None
        try:
            refuse_other_sites(self.headers)
            caller = None if "authorization" in self.headers else self.caller()
        except Denied as why:
            denied = (why.status, why.detail)
        host = self._connection.host
        return Forwarded(key, node, caller, denied, self.uid, self.is_loopback, process, no_process, host)

    async def know_user(self) -> None:
        """Let the Unix user of a local caller be looked up, off the event loop. What is not known in time stays unknown."""
        if self.forwarded is None and self.is_loopback and "authorization" not in self.headers:
            with suppress(UserNotKnown):
                uid = await self._connection.find_uid()
                if uid is not None:
                    await self._users.know(uid)

    def _find_user(self) -> User | None:
        uid = self._connection.uid
        return None if uid is None else self._users.find(uid)

    async def body(self) -> bytes:
        if self._known is not None:
            return self._known.body
        exchange = self.scope.get(EXCHANGE)
        return await read_body(self.receive, self.headers, limits=self._limits, exchange=exchange)

    def gone(self) -> asyncio.Future[None]:
        """A future that is done when the client has disconnected, or the token of its caller is revoked. It must be
        cancelled when that is not waited for any more.
        """
        exchange: Exchange | None = self.scope.get(EXCHANGE)
        gone = asyncio.ensure_future(until_gone(self.receive)) if exchange is None else exchange.gone()
        self.end_when_revoked(gone)
        return gone

    def end_when_revoked(self, waiting: asyncio.Future[None]) -> None:
        """Cancel this future if the token of the caller is revoked."""
        if self._token is not None:
            self.rules.tokens.end_when_revoked(self._token, waiting)

    def check_token(self) -> None:
        """Denied if the token by which the caller was identified has been revoked."""
        if self._token is not None:
            self.caller()

    async def no_body(self) -> None:
        """Refuse a call with a body. What a caller says must not be dropped in silence."""
        if await self.body():
            method = self.scope["method"]
            raise Refusal(422, f"{method} takes no body; put what you have to say into the query, or leave it out.")

    async def form(self, kind: type[FormT]) -> FormT:
        return parse_form(kind, await self.body())

    def query(self, *known: Parameter) -> dict[str, Any]:
        """The values of these parameters by name; Refusal if one is invalid, unknown or given twice."""
        if self._known is None:
            return self._read_query(known)
        head = self._known.head
        if head.query is None:
            head.query = self._read_query(known)
        return head.query

    def _read_query(self, known: tuple[Parameter, ...]) -> dict[str, Any]:
        if not self._raw_query:
            return {parameter.name: parameter.default for parameter in known}
        found: dict[str, str | None] = {parameter.name: None for parameter in known}
        try:
            pairs = parse_qsl(self._raw_query, keep_blank_values=True, max_num_fields=MAX_PARAMETERS)
        except ValueError:
            raise Refusal(422, f"The query has too many parameters; there must be at most {MAX_PARAMETERS}.") from None
        for name, text in pairs:
            if name not in found:
                allowed = f"it must be {_one_of(tuple(found))}" if found else "this call takes none"
                raise Refusal(422, f"The query has an unknown parameter {name[:40]!r}; {allowed}.")
            if found[name] is not None:
                raise Refusal(422, f"The query's parameter {name} is given twice; send it once.")
            found[name] = text
        return {parameter.name: _value(parameter, found[parameter.name]) for parameter in known}

    def lenient_query(self, parameter: Parameter) -> Any:
        """The value of one parameter; all others are ignored."""
        for name, text in parse_qsl(self._raw_query[:1000], keep_blank_values=not parameter.is_whole):
            if name == parameter.name:
                return _value(parameter, text)
        return parameter.default

    @property
    def _raw_query(self) -> str:
        query: bytes = self.scope.get("query_string", b"")
        return query.decode("latin-1")


_DECIMAL = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?|\.[0-9]{1,18}")


def _value(parameter: Parameter, text: str | None) -> Any:
    if text is None:
        return parameter.default
    if parameter.choices:
        if text in parameter.choices:
            return text
        wanted = _one_of(parameter.choices)
    elif parameter.is_whole:
        if text.isascii() and text.isdigit() and len(text) < 10:
            return int(text)
        wanted = "a whole number from 0 to 999999999"
    elif parameter.range is not None:
        low, high = parameter.range.low, parameter.range.high
        # Without the underscores and names that Python's float takes.
        if _DECIMAL.fullmatch(text) and low <= (number := float(text)) <= high:
            return number
        wanted = f"a number of {parameter.unit} from {low:.15g} to {high:.15g}"
    elif parameter.longest is not None:
        if len(text) <= parameter.longest and is_printable(text):
            return text.strip() or None
        wanted = f"a text of at most {parameter.longest} printable characters"
    else:
        return text
    raise Refusal(422, f"{parameter.name}: {text[:40]!r} is not valid; it must be {wanted}.")


def _one_of(choices: tuple[str, ...]) -> str:
    return " or ".join(choices) if len(choices) <= 2 else f"one of {', '.join(choices)}"


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


Handler = Callable[[Call], Awaitable[Response]]
Handlers = Mapping[str, Handler]
