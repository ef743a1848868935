"""A call as its handler sees it: the caller, its address, the query and the body."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property
from math import isfinite
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope

from gpu_worker_pool.wire.routes import Parameter
from gpu_worker_pool.wire.strict import parse_form

from .access import Caller, Denied, Tokens, identify, is_loopback, merge_headers, proxy_header
from .bodies import read_body
from .problems import Refused
from .response import Response

MAX_PARAMETERS = 20

FormT = TypeVar("FormT")


class Call:
    """One request. `parameters` are those in its path."""

    def __init__(self, scope: Scope, receive: Receive, tokens: Tokens) -> None:
        self.scope = scope
        self.receive = receive
        self.parameters: Mapping[str, str] = {}
        self.tokens = tokens
        self.client_host: str | None = scope["client"][0] if scope.get("client") else None

    @cached_property
    def headers(self) -> dict[str, str]:
        return merge_headers(self.scope["headers"])

    def caller(self) -> Caller:
        """The caller of a writing call; Denied if it may not write."""
        return identify(self.client_host, self.headers, self.tokens)

    def caller_or_none(self) -> Caller | None:
        """The caller if it may write; None otherwise."""
        try:
            return self.caller()
        except Denied:
            return None

    @property
    def is_loopback(self) -> bool:
        """Whether the call came directly from this machine, without a proxy."""
        return is_loopback(self.client_host) and proxy_header(self.headers) is None

    async def body(self) -> bytes:
        return await read_body(self.receive, self.headers)

    async def form(self, kind: type[FormT]) -> FormT:
        """The body, checked strictly."""
        return parse_form(kind, await self.body())

    def query(self, *known: Parameter) -> dict[str, Any]:
        """The values of these parameters by name; Refused if one is invalid or unknown."""
        return {parameter.name: _value(parameter, text) for parameter, text in self._pairs(known).items()}

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

    def _pairs(self, known: tuple[Parameter, ...]) -> dict[Parameter, str | None]:
        names = {parameter.name: parameter for parameter in known}
        found: dict[Parameter, str | None] = dict.fromkeys(known)
        try:
            pairs = parse_qsl(self._raw_query, keep_blank_values=True, max_num_fields=MAX_PARAMETERS)
        except ValueError:
            raise Refused(422, f"The query has too many parameters; there must be at most {MAX_PARAMETERS}.") from None
        for name, text in pairs:
            if name not in names:
                allowed = f"it must be {_one_of(tuple(names))}" if names else "this call takes none"
                raise Refused(422, f"The query has an unknown parameter {name[:40]!r}; {allowed}.")
            if found[names[name]] is not None:
                raise Refused(422, f"The query's parameter {name} is given twice; send it once.")
            found[names[name]] = text
        return found


def _value(parameter: Parameter, text: str | None) -> Any:
    if text is None:
        return parameter.default
    if parameter.choices:
        if text not in parameter.choices:
            raise Refused(
                422, f"{parameter.name}: {text[:40]!r} is not valid; it must be {_one_of(parameter.choices)}."
            )
        return text
    if parameter.is_whole:
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise Refused(
                422, f"{parameter.name}: {text[:40]!r} is not valid; it must be a whole number from 0 to 999999999."
            )
        return int(text)
    if parameter.range is None:
        return text
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    low, high = parameter.range.low, parameter.range.high
    if not isfinite(number) or not low <= number <= high:
        raise Refused(
            422,
            f"{parameter.name}: {text[:40]!r} is not valid; "
            f"it must be a number of {parameter.unit} from {low:g} to {high:g}.",
        )
    return number


def _one_of(choices: tuple[str, ...]) -> str:
    return " or ".join(choices) if len(choices) <= 2 else f"one of {', '.join(choices)}"


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


Handler = Callable[[Call], Awaitable[Response]]
Handlers = Mapping[str, Handler]
