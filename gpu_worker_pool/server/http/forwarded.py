"""A call that another box passes on to the leader: what that box says of the caller, and how the leader answers it.

It comes on the link of that box, which has proven the key of the fleet (agent/link.py), so the leader believes what it says. No
call is passed on twice, so there are no loops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import unquote

from pydantic import TypeAdapter
from starlette.types import ASGIApp, Message, Scope

from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.server.agent.frames import Ask
from gpu_worker_pool.server.agent.link import LinkReply

from .access import Caller, Denied
from .response import Refusal

# The key under which the scope of a call has what the box says that passed it on.
KEY: Final = "gpu_pool.forwarded"
# The headers of an answer that its caller gets.
ANSWERED: Final = frozenset({
    b"content-type", b"content-encoding", b"cache-control", b"vary", b"etag", b"retry-after", b"www-authenticate",
    b"x-accel-buffering", b"accept-encoding", b"content-length",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A call that came by another box. `node` is that box, as its link has proven.

    `caller` is who called there without a token, and `token` the digest of the caller's token, which the leader checks: the
    token itself stays at the box. `denied` is why the caller may not write, with the status, if the box knows. `process` is
    the holder's on that box. `no_process` says, with a status, why the call names a process that is none, or that another
    user has: an administrator may.
    """

    node: str = ""
    caller: Caller | None = None
    token: str | None = None
    denied: tuple[int, str] | None = None
    uid: int | None = None
    process: ProcessId | None = None
    no_process: tuple[int, str] | None = None
    host: str | None = None

    def encoded(self) -> str:
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def read(cls, text: str, node: str) -> Forwarded:
        """What the box of this node says; a ValueError if it cannot be read."""
        return replace(_ADAPTER.validate_json(text, strict=True), node=node)

    def identified(self) -> Caller | None:
        """Who called; None for a call with a token. Denied if the box says so."""
        if self.denied is not None:
            status, detail = self.denied
            raise Denied(401 if status == 401 else 403, detail)
        if self.caller is None and self.token is None:
            raise Denied(401, "The box that passed this call on names no caller.")
        return self.caller

    def holder_process(self, *, is_admin: bool) -> ProcessId | None:
        """The process of the holder; Refusal if the call names one that it may not."""
        if self.no_process is not None and not (is_admin and self.process is not None):
            raise Refusal(*self.no_process)
        return self.process


_ADAPTER = TypeAdapter(Forwarded)


class PassedOnCalls:
    """Answers calls of other boxes by this server's application. `keeper_of` is the node that keeps a lease."""

    def __init__(self, app: ASGIApp, prefix: str, keeper_of: Callable[[str], str | None]) -> None:
        self._app = app
        self._prefix = prefix
        self._keeper_of = keeper_of

    async def answer(self, node: str, ask: Ask, body: bytes, reply: LinkReply) -> None:
        try:
            scope = self._scope(ask, body, Forwarded.read(ask.said, node))
        except ValueError:
            await reply.begin(400)
            return
        is_read = False

        async def receive() -> Message:
            nonlocal is_read
            if not is_read:
                is_read = True
                return {"type": "http.request", "body": body}
            await asyncio.wait([reply.gone])
            return {"type": "http.disconnect"}

        await self._app(scope, receive, _Sending(reply, scope, self._keeper_of).send)

    def _scope(self, ask: Ask, body: bytes, said: Forwarded) -> Scope:
        path, _, query = ask.target.partition("?")
        raw_path = f"{self._prefix}{path}"
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in ask.headers]
        if body:
            headers.append((b"content-length", b"%d" % len(body)))
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": ask.method,
            "scheme": "http",
            "path": unquote(raw_path),
            "raw_path": raw_path.encode("latin-1"),
            "query_string": query.encode("latin-1"),
            "root_path": "",
            "headers": headers,
            "client": None,
            "server": None,
            KEY: said,
        }


class _Sending:
    """Sends the answer of an application. A short one goes in one frame."""

    def __init__(self, reply: LinkReply, scope: Scope, keeper_of: Callable[[str], str | None]) -> None:
        self._reply = reply
        self._scope = scope
        self._keeper_of = keeper_of
        self._start: Message | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        body, is_last = message.get("body", b""), not message.get("more_body", False)
        if self._scope["method"] == "HEAD":
            body = b""
        if self._start is None:
            await self._reply.go_on(body, is_last=is_last)
            return
        start, self._start = self._start, None
        headers = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in start["headers"] if name in ANSWERED
        ]
        lease_id = self._path_params.get("lease_id")
        keeper = None if lease_id is None else self._keeper_of(lease_id)
        await self._reply.begin(start["status"], headers, body, is_whole=is_last, keeper=keeper)

    @property
    def _path_params(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._scope.get("path_params", {})
        return found
