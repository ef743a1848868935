"""A call as its handler sees it: the caller, its address, the query and the body."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope

from gpu_worker_pool.wire.routes import Parameter
from gpu_worker_pool.wire.strict import FormT, parse_form

from .access import Caller, Denied, Tokens, identify, is_loopback, merge_headers, proxy_header
from .bodies import read_body
from .problems import Refused
from .response import Response
from .time_limits import TimeLimits

MAX_PARAMETERS = 20


class Call:
    """One request. `parameters` are those in its path."""

    def __init__(self, scope: Scope, receive: Receive, tokens: Tokens, limits: TimeLimits | None = None) -> None:
        self.scope = scope
        self.receive = receive
        self.parameters: Mapping[str, str] = {}
        self.tokens = tokens
        self._limits = limits
        self.client_host: str | None = scope["client"][0] if scope.get("client") else None

    @cached_property
    def headers(self) -> dict[str, str]:
        return merge_headers(self.scope["headers"])

    def caller(self) -> Caller:
        """The caller of a writing call; Denied if it may not write."""
        return identify(self.client_host, self.headers, self.tokens)

    def caller_or_none(self) -> Caller | None:
        try:
            return self.caller()
        except Denied:
            return None

    @property
    def is_loopback(self) -> bool:
        """Whether the call came directly from this machine, without a proxy."""
        return is_loopback(self.client_host) and proxy_header(self.headers) is None

    async def body(self) -> bytes:
        return await read_body(self.receive, self.headers, limits=self._limits)

    async def form(self, kind: type[FormT]) -> FormT:
        return parse_form(kind, await self.body())

    def query(self, *known: Parameter) -> dict[str, Any]:
        """The values of these parameters by name; Refused if one is invalid, unknown or given twice."""
        found: dict[str, str | None] = {parameter.name: None for parameter in known}
        try:
            pairs = parse_qsl(self._raw_query, keep_blank_values=True, max_num_fields=MAX_PARAMETERS)
        except ValueError:
            raise Refused(422, f"The query has too many parameters; there must be at most {MAX_PARAMETERS}.") from None
        for name, text in pairs:
            if name not in found:
                allowed = f"it must be {_one_of(tuple(found))}" if found else "this call takes none"
                raise Refused(422, f"The query has an unknown parameter {name[:40]!r}; {allowed}.")
            if found[name] is not None:
                raise Refused(422, f"The query's parameter {name} is given twice; send it once.")
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
        with suppress(ValueError):
            if low <= (number := float(text)) <= high:
                return number
        wanted = f"a number of {parameter.unit} from {low:g} to {high:g}"
    else:
        return text
    raise Refused(422, f"{parameter.name}: {text[:40]!r} is not valid; it must be {wanted}.")


def _one_of(choices: tuple[str, ...]) -> str:
    return " or ".join(choices) if len(choices) <= 2 else f"one of {', '.join(choices)}"


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


Handler = Callable[[Call], Awaitable[Response]]
Handlers = Mapping[str, Handler]
