"""Heads of requests that a connection sends again and again.

A worker requests and releases leases over one connection, and its requests differ by the id of the lease only. Such a head
was read before, so `BoundedProtocol` knows it by its bytes, and does not read it again. What follows from the head alone is
worked out once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Scope

from gpu_worker_pool.host.users import User
from gpu_worker_pool.wire.bounds import is_lease_id

from .access import Caller
from .bodies import MAX_BODY_BYTES
from .connection import HARMLESS, Connection
from .exchange import EXCHANGE

# Heads that one connection knows: a request and a release have different ones, and bodies of several lengths.
MOST_HEADS = 4
MOST_BYTES = 1024
# The key under which `BoundedProtocol` puts the KnownCall into the scope of a call whose head it knows.
KNOWN_CALL = "gpu_pool.known_call"

_VERSION = b" HTTP/1.1\r\n"
_END = b"\r\n\r\n"


@dataclass(eq=False, slots=True)
class KnownHead:
    """A head without the id of its lease. None of its headers holds a secret, or says that a proxy passed the call on.

    `scope` has what the scopes of its calls have in common, `length` is that of the body. `app` answers its calls. `query` has
    the values of the parameters, once they were read. `local` is the caller that was identified by this head, with its user
    at that time.
    """

    scope: Scope
    headers: Mapping[str, str]
    length: int
    app: ASGIApp
    query: dict[str, Any] | None = None
    local: tuple[User, Caller] | None = None


class KnownCall(NamedTuple):
    head: KnownHead
    lease_id: str
    body: bytes

    def scope(self) -> dict[str, Any]:
        """The scope of this call, as the server would have made it."""
        path = f"{self.head.scope['path'].rpartition('/')[0]}/{self.lease_id}"
        return {**self.head.scope, "path": path, "raw_path": path.encode(), KNOWN_CALL: self}


class KnownHeads:
    """The last heads of one connection, by their bytes."""

    def __init__(self) -> None:
        self._heads: dict[tuple[bytes, bytes, bytes], KnownHead] = {}

    def __repr__(self) -> str:
        return f"<KnownHeads: {len(self._heads)}>"

    def find(self, request: bytes) -> KnownCall | None:
        """The call that these bytes are, if they are one whole request with a known head."""
        if not self._heads:
            return None
        line, _, rest = request.partition(_VERSION)
        path, _, query = line.partition(b"?")
        before, _, lease_id = path.rpartition(b"/")
        fields, _, body = rest.partition(_END)
        head = self._heads.get((before, query, fields))
        if head is None or len(body) != head.length:
            return None
        text = lease_id.decode("latin-1")
        return KnownCall(head, text, body) if is_lease_id(text) else None

    def learn(self, request: bytes, scope: Scope, connection: Connection, app: ASGIApp) -> None:
        """Know the head of these bytes from now on, if they are one whole request for a lease, which was read as this scope."""
        line, _, rest = request.partition(_VERSION)
        fields, end, body = rest.partition(_END)
        headers = connection.headers_of(scope["headers"])
        path, _, query = line.partition(b"?")
        before, _, lease_id = path.rpartition(b"/")
        is_whole = (
            # Nothing in the path is escaped.
            path == f"{scope['method']} {scope['path']}".encode()
            and query == scope["query_string"]
            and is_lease_id(lease_id.decode("latin-1"))
            # Each header is a line of its own.
            and bool(end)
            and fields.count(b"\n") == fields.count(b"\r\n") == len(scope["headers"]) - 1
            and headers.get("content-length", "0") == str(len(body))
        )
        is_plain = headers.keys() <= HARMLESS and headers.get("connection", "keep-alive").lower() == "keep-alive"
        if is_whole and is_plain and len(line) + len(fields) <= MOST_BYTES and len(body) <= MAX_BODY_BYTES:
            if len(self._heads) >= MOST_HEADS:
                self._heads.clear()
            common = {key: value for key, value in scope.items() if key != EXCHANGE}
            self._heads[before, query, fields] = KnownHead(common, headers, len(body), app)
