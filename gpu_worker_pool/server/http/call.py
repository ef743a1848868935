"""A call as its handler sees it: the caller, its address, the query and the body."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope

from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.host.connections import UserNotKnown
from gpu_worker_pool.host.users import User, Users
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.authority.presence import ClientGone
from gpu_worker_pool.server.views.target import EVERYTHING

from .access import (
    AccessRules,
    Caller,
    Connection,
    Denied,
    Origin,
    caller_by_digest,
    digest_in,
    identify,
    is_loopback,
    merge_headers,
    proxy_header,
    refuse_other_sites,
)
from .forwarded import KEY as FORWARDED
from .forwarded import Forwarded
from .response import CLOSE, Refusal

MAX_BODY_BYTES = 65_536
BODY_TIMEOUT_S = 10.0
PartT = TypeVar("PartT")


class Call(Request):
    """One request. `target` is what it means: the box that was asked, or the whole fleet."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        self._joined_headers = merge_headers(scope["headers"])
        self.target = EVERYTHING
        # What the box says that passed the call on, if one did.
        self.forwarded: Forwarded | None = scope.get(FORWARDED)
        # Whether this box answers by what it knows itself, for want of a leader.
        self.has_no_leader = False
        # The status of an answer that is not a whole response.
        self.status = 200
        self._connection = Connection.of_scope(scope)
        self._caller: Caller | None = None
        self._whole_body: bytes | None = None
        # The digest of the token by which the caller was identified.
        self._token: str | None = None

    def part(self, kind: type[PartT]) -> PartT:
        """The part of this kind of the application that serves the call."""
        found: PartT = self.scope["app"].parts[kind]
        return found

    @property
    def pool(self) -> Pool:
        return self.part(Pool)

    @property
    def rules(self) -> AccessRules:
        return self.part(AccessRules)

    @property
    def endpoints(self) -> Mapping[str, str]:
        """What the home page says of each call, by its path."""
        found: Mapping[str, str] = self.scope["app"].endpoints
        return found

    @property
    def is_stopping(self) -> bool:
        """Whether the server is stopping, which ends all calls."""
        found: bool = self.scope["app"].is_stopping
        return found

    @property
    def headers(self) -> Mapping[str, str]:  # type: ignore[override]
        """The headers by lower-case name; repeated ones are joined."""
        return self._joined_headers

    @property
    def via_box(self) -> str | None:
        """The box by which the call came, if that is not this one."""
        return None if self.forwarded is None else self.forwarded.node

    def caller(self) -> Caller:
        """The caller of a writing call; Denied if it may not write."""
        if self._caller is None:
            self._caller = self._identify()
        return self._caller

    def _identify(self) -> Caller:
        if self.forwarded is not None:
            if (known := self.forwarded.identified()) is not None:
                return known
            caller = caller_by_digest(self.forwarded.token or "", self.rules, self._host)
        else:
            origin = Origin(self._connection.host, self._connection.is_unix, self._find_user)
            caller = identify(origin, self.headers, self.rules)
        self._token = self._presented()
        return caller

    def _presented(self) -> str | None:
        """The digest of the token that came with the call; None if none did. Denied if its header is not as it must be."""
        if self.forwarded is not None:
            return self.forwarded.token
        authorization = self.headers.get("authorization")
        return None if authorization is None else digest_in(authorization)

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
        has_token = "authorization" in self.headers or (self.forwarded is not None and self.forwarded.token is not None)
        caller = self.caller_or_none() if has_token else None
        if caller is not None and caller.name is not None:
            return caller.name
        if self.uid is None:
            return self._host
        return f"uid {self.uid}" if self.via_box is None else f"uid {self.uid} of {self.via_box}"

    @property
    def _host(self) -> str:
        """Where the caller is, as far as that is known."""
        if self.forwarded is not None:
            return f"{self.forwarded.host or ''} by {self.forwarded.node}"
        return self._connection.host or ""

    @cached_property
    def is_loopback(self) -> bool:
        """Whether the call came directly from this machine, without a proxy."""
        if self.forwarded is not None:
            return False  # it was another machine
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

    def forwarded_by(self, process: ProcessId | None = None, no_process: tuple[int, str] | None = None) -> Forwarded:
        """What this box says of the call when it passes it on."""
        caller, token, denied = None, None, None
        try:
            refuse_other_sites(self.headers)
            token = self._presented()
            caller = self.caller() if token is None else None
        except Denied as why:
            denied = (why.status, why.detail)
        return Forwarded(
            caller=caller,
            token=token,
            denied=denied,
            uid=self.uid,
            process=process,
            no_process=no_process,
            host=self._connection.host,
        )

    async def know_user(self) -> None:
        """Let the Unix user of a local caller be looked up, off the event loop. What is not known in time stays unknown."""
        if self.forwarded is None and self.is_loopback and "authorization" not in self.headers:
            with suppress(UserNotKnown):
                uid = self._connection.uid
                if uid is not None:
                    await self.part(Users).know(uid)

    def _find_user(self) -> User | None:
        uid = self._connection.uid
        return None if uid is None else self.part(Users).find(uid)

    async def body(self) -> bytes:
        if self._whole_body is None:
            has_body = "content-length" in self.headers or "transfer-encoding" in self.headers
            self._whole_body = await read_body(self.receive, self.headers) if has_body else b""
        return self._whole_body

    def gone(self) -> asyncio.Future[None]:
        """A future that is done when the client has disconnected, or the token of its caller is revoked. It must be
        cancelled when that is not waited for any more.
        """
        gone = asyncio.ensure_future(until_gone(self.receive))
        self.end_when_revoked(gone)
        return gone

    def end_when_revoked(self, waiting: asyncio.Future[None]) -> None:
        """Cancel this future if the token of the caller is revoked."""
        if self._token is not None:
            self.rules.tokens.end_when_revoked(self._token, waiting)

    def check_token(self) -> None:
        """Denied if the token by which the caller was identified has been revoked."""
        if self._token is not None:
            self._identify()

    @property
    def raw_query(self) -> str:
        query: bytes = self.scope.get("query_string", b"")
        return query.decode("latin-1")


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(
    receive: Receive,
    headers: Mapping[str, str],
    *,
    limit: int = MAX_BODY_BYTES,
    timeout_s: float = BODY_TIMEOUT_S,
) -> bytes:
    """Read the whole body; Refusal if it is too large, too slow, compressed or incomplete.

    The time is for the whole body: a client that sends a byte now and then is too slow.
    """
    encoding = headers.get("content-encoding")
    if encoding is not None and encoding.strip().lower() not in {"", "identity"}:
        detail = "The body must not be compressed; send it without Content-Encoding."
        raise Refusal(415, detail, {"Accept-Encoding": "identity"})
    if _says_more_than(limit, headers.get("content-length", "")):
        raise _too_large(limit)
    try:
        async with asyncio.timeout(timeout_s):
            return await _collect(receive, limit)
    except TimeoutError:
        detail = f"The body did not arrive within {timeout_s:g} seconds; send it at once."
        raise Refusal(408, detail, CLOSE) from None


async def _collect(receive: Receive, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("The connection was closed before the body had arrived.")
        chunk = message.get("body", b"")
        size += len(chunk)
        # Content-Length may be missing or wrong: only the bytes that arrive count.
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _says_more_than(limit: int, length: str) -> bool:
    digits = length.strip()
    if not (digits.isascii() and digits.isdigit()):
        return False  # missing or invalid: the counting decides
    # Python does not convert numbers of thousands of digits.
    return len(digits) > 18 or int(digits) > limit


def _too_large(limit: int) -> Refusal:
    return Refusal(413, f"The body is too large; it must be at most {limit} bytes.", CLOSE)
