"""A call as those who answer it see it: who makes it, from where, and what was sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope

from .access import Caller, Denied, Tokens, identify, is_loopback, merge_headers, proxy_header
from .bodies import read_body
from .problems import Refused

Reply = tuple[int, bytes]


class Call:
    """One request: who makes it, and how to read it."""

    def __init__(self, scope: Scope, receive: Receive, tokens: Tokens) -> None:
        self.receive = receive
        self.headers = merge_headers(scope["headers"])
        self.client_host: str | None = scope["client"][0] if scope.get("client") else None
        self._query: bytes = scope.get("query_string", b"")
        self._tokens = tokens

    def caller(self) -> Caller:
        """Who may change things; Denied for everybody else."""
        return identify(self.client_host, self.headers, self._tokens)

    def caller_or_none(self) -> Caller | None:
        """Who makes a call that everybody may make."""
        try:
            return self.caller()
        except Denied:
            return None

    @property
    def is_loopback(self) -> bool:
        """Whether it came straight from this machine."""
        return is_loopback(self.client_host) and proxy_header(self.headers) is None

    async def body(self) -> bytes:
        """What was sent."""
        return await read_body(self.receive, self.headers)

    def number(self, name: str, default: int) -> int:
        """A whole number among the query's parameters, whatever else is there."""
        for known, value in parse_qsl(self._query.decode("latin-1")[:1000]):
            if known == name:
                if not (value.isascii() and value.isdigit() and len(value) < 10):
                    raise Refused(422, f"{name}: {value[:40]!r} is no whole number of 0 or more.")
                return int(value)
        return default

    def query(self, *known: str) -> dict[str, str]:
        """The query's parameters, all of which must be known."""
        found: dict[str, str] = {}
        try:
            pairs = parse_qsl(self._query.decode("latin-1"), keep_blank_values=True, max_num_fields=20)
        except ValueError:
            raise Refused(422, "The query has too many parameters.") from None
        for name, value in pairs:
            if name not in known:
                possible = f"possible are {', '.join(known)}" if known else "none is possible here"
                raise Refused(422, f"The query has an unknown parameter {name[:40]!r}; {possible}.")
            if name in found:
                raise Refused(422, f"The query's parameter {name} is given twice.")
            found[name] = value
        return found


def not_possible(method: str, path: str, possible: tuple[str, ...]) -> Callable[[Call], Awaitable[Reply]] | None:
    """What answers a call by a method that is not possible there."""
    if method == "OPTIONS":
        return None  # a browser asks what a page of another origin may do; that is answered for all calls alike

    async def refuse(_: Call) -> Reply:
        allowed = ", ".join(possible)
        raise Refused(405, f"{method} is not possible at {path[:200]}; use {allowed}.", {"Allow": allowed})

    return refuse


async def until_gone(receive: Receive) -> None:
    """Return when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass
