"""uvicorn's HTTP, with bounds on a request's head and trailers in size and time, on a body that never comes, and on the time to
take the answer. A head that is not valid is answered as every other error is.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, NoReturn

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .access import CONNECTION, Connection
from .front import size_of
from .response import CLOSE, Refusal, problem_of

# No honest client sends a larger head, or takes longer.
HEAD_S = 5.0
MAX_HEAD_BYTES = 64 * 1024
# A caller that takes nothing of its answer, or of its stream, for this long is cut off.
STALLED_S = 20.0
TOO_LARGE = f"The head of the request is larger than {MAX_HEAD_BYTES} bytes; send fewer or shorter headers."
INVALID = "The request is not valid HTTP: its method is not known, or its first line or a header is malformed."
# All but 100 Continue, for which the client waits before it sends its body.
_FINAL_HEADS = tuple(b"HTTP/1.1 %d" % kind for kind in (2, 3, 4, 5))
_AUTHORITY = re.compile(rb"[^/?#]*://([^/?#]*)")


class JoinedWrites:
    """A transport that writes the head of an answer with the beginning of its body: uvicorn writes them separately, and a system
    call takes as long as a tenth of a lease. A head without a body goes out with `flush`.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self.plain = transport
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        """All else is as the transport has it."""
        return getattr(self.plain, name)

    def write(self, data: bytes) -> None:
        head, self._head = self._head, b""
        if head or not data.startswith(_FINAL_HEADS):
            self.plain.write(head + data)
        else:
            self._head = data

    def close(self) -> None:
        self.flush()
        self.plain.close()

    def flush(self) -> None:
        if self._head:
            self.write(b"")


class BoundedProtocol(HttpToolsProtocol):
    """Closes a connection whose head or trailers are too large or not complete in time, and one whose answered request never
    ends. `read_body` bounds the bodies that a route reads.

    Of uvicorn it overrides callbacks of asyncio and httptools, and relies on the names that tests/server/http/test_protocol.py
    lists.
    """

    head_s = HEAD_S
    stalled_s = STALLED_S
    # The only path at which a WebSocket may be opened; None: nowhere.
    websocket_path: bytes | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        # The bytes since the head began, or since the last byte of the body: those of the head or of the trailers.
        self._head_bytes = 0
        self._is_in_head = True
        self._had_body = False
        self._received = 0
        self._is_upgraded = False
        self._why_invalid = INVALID
        # The call that is answered now. `cycle` is the one that came last: a client may send several without waiting.
        self._answered: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(JoinedWrites(transport))  # type: ignore[arg-type]
        self._connection = Connection.of_transport(transport)
        self._close_after(self.head_s, "head")

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        if self._answered is not None:
            self._answered.disconnected = not self._answered.response_complete
            self._answered.message_event.set()

    def data_received(self, data: bytes) -> None:
        self._had_body, self._received = False, len(data)
        super().data_received(data)
        if self.transport.is_closing() or self._had_body or self._is_upgraded:
            return
        cycle: RequestResponseCycle | None = self.cycle
        is_between = cycle is None or (cycle.response_complete and not cycle.more_body)
        if self._is_in_head or is_between:
            self._close_after(self.head_s, "head")
        if self._is_in_head or is_between or self.cycle.more_body:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._why_invalid = TOO_LARGE
                self.send_400_response(TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CONNECTION] = self._connection  # type: ignore[literal-required]
        self._is_in_head, self._head_bytes = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. One after the head is a trailer, which no call needs."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check the head. An error raised here is answered with 400."""
        self._stop("head")
        self._is_in_head = False
        # Much may have arrived with the head, as the body.
        if self._head_bytes + self._received > MAX_HEAD_BYTES and size_of(self.headers) > MAX_HEAD_BYTES:
            self._refuse(TOO_LARGE)
        self._head_bytes = 0
        self._check_authority()
        super().on_headers_complete()
        if self._answered is None or self._answered.response_complete:
            self._answered = self.cycle

    def on_body(self, body: bytes) -> None:
        self._had_body, self._head_bytes = True, 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop("rest")
        super().on_message_complete()
        if self.cycle is not None:  # it is None for a WebSocket
            self.cycle.more_body = False

    def on_response_complete(self) -> None:
        """Begin the next call, or watch that the connection is not idle for too long. A request that is answered and whose body
        has not ended must do so soon.
        """
        self.transport.flush()  # type: ignore[attr-defined]
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body and not self.transport.is_closing():
            self._close_after(self.head_s, "rest")

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over, with no timer left that could close it."""
        for name in tuple(self._timers):
            self._stop(name)
        self._unset_keepalive_if_required()
        self._is_upgraded = True
        self.transport = self.transport.plain  # type: ignore[attr-defined]
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's text says less than ours
        """Answer with a problem, and close the connection. A request that is answered already, and does not end as it should,
        gets no second answer.
        """
        if self._answered is not None and self._answered.response_started and self._answered.more_body:
            self.transport.close()
            return
        status, body, headers = problem_of(Refusal(400, self._why_invalid, CLOSE))
        assert isinstance(body, bytes)  # noqa: S101 - a problem is not a stream
        own = [*self.server_state.default_headers, *headers, (b"content-length", b"%d" % len(body))]
        lines = [b"HTTP/1.1 %d Bad Request" % status, *(name + b": " + value for name, value in own)]
        self.transport.write(b"\r\n".join([*lines, b"", body]))
        self.transport.close()

    def pause_writing(self) -> None:
        """Cut off a caller that takes nothing of its answer for this long: what is buffered for it is not freed otherwise."""
        super().pause_writing()
        self._timers["stalled"] = self.loop.call_later(self.stalled_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("stalled")

    def _should_upgrade_to_ws(self) -> bool:
        return self.websocket_path is not None and self.url.partition(b"?")[0] == self.websocket_path

    def _check_authority(self) -> None:
        """Refuse an address that names another host than the Host header, by which the access rules decide."""
        if found := _AUTHORITY.match(self.url):
            hosts = [value.lower() for name, value in self.headers if name == b"host"]
            if hosts != [found[1].lower()]:
                shown = found[1][:100].decode("ascii", "backslashreplace")
                self._refuse(f"The address names the host {shown!r}, and the Host header does not; make them the same.")

    def _refuse(self, why: str) -> NoReturn:
        """End the reading of a request. uvicorn answers an error with `send_400_response`."""
        self._why_invalid = why
        raise ValueError(why)

    def _close_after(self, seconds: float, name: str) -> None:
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, self.transport.close)

    def _stop(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
