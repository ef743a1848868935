"""A call on a connection of `BoundedProtocol`: the whole of its body, its whole answer, and whether its client is there.

uvicorn makes a task for each request, and two writes for each answer. A lease is requested and released often, and both
calls arrive in one piece. So `BoundedProtocol` begins to answer such a call in its own callback. When it waits, as for its
commit, it gets a task. Under another server there is no `Exchange`, and the calls are answered in the ordinary way.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator, Sequence
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle
from uvicorn.protocols.utils import get_client_addr, get_path_with_query_string

from gpu_worker_pool.server.access_log import LogCall

from .response import Headers

# The key under which `BoundedProtocol` puts the exchange into the scope of each call.
EXCHANGE = "gpu_pool.exchange"
# What a call that has ended waits for.
ENDED: Final = object()


class Exchange:
    def __init__(self, cycle: RequestResponseCycle, log_call: LogCall) -> None:
        self._cycle = cycle
        self._log_call = log_call
        self._gone: asyncio.Future[None] | None = None

    @property
    def has_arrived(self) -> bool:
        """Whether the whole request is here, and its client does not wait for leave to send the body."""
        cycle = self._cycle
        return not (cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue)

    def take_body(self) -> bytes | None:
        """The body, if all of it has arrived and none of it was read; None if it has to be waited for."""
        cycle = self._cycle
        if not self.has_arrived or not cycle.message_event.is_set():
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        cycle.flow.resume_reading()
        return body

    def gone(self) -> asyncio.Future[None]:
        """A future that is done when the client has disconnected. It may be cancelled, and asked for once."""
        self._cycle.flow.resume_reading()
        self._gone = asyncio.get_running_loop().create_future()
        if self._cycle.disconnected:
            self._gone.set_result(None)
        return self._gone

    def note_disconnect(self) -> None:
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)

    def answer(self, status: int, headers: Headers, body: bytes) -> bool:
        """Send a whole answer in one write; False if it must be sent in the ordinary way. The headers are our own, without
        Connection, and without the length of the body.
        """
        cycle = self._cycle
        if cycle.flow.write_paused or cycle.disconnected or cycle.response_started:
            return False
        if cycle.access_log:
            asked = get_client_addr(cycle.scope), cycle.scope["method"], get_path_with_query_string(cycle.scope)
            self._log_call(*asked, cycle.scope["http_version"], status)
        head = _beginnings.of(cycle.default_headers, status, headers)
        end = b"" if cycle.keep_alive else b"connection: close\r\n"
        cycle.response_started = cycle.response_complete = True
        cycle.transport.write(b"%b%d\r\n%b\r\n%b" % (head, len(body), end, body))
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        return True


class _AnswerBeginnings:
    """The heads of answers up to the length of the body. The server replaces its default headers once a second: the date is
    one of them.
    """

    def __init__(self) -> None:
        self._default_headers: Sequence[tuple[bytes, bytes]] = ()
        self._kept: dict[tuple[int, Headers], bytes] = {}

    def of(self, default_headers: Sequence[tuple[bytes, bytes]], status: int, headers: Headers) -> bytes:
        if default_headers is not self._default_headers:
            self._default_headers, self._kept = default_headers, {}
        kept = self._kept.get((status, headers))
        if kept is None:
            lines = b"".join([b"%b: %b\r\n" % header for header in (*default_headers, *headers)])
            kept = self._kept[status, headers] = b"%b%bcontent-length: " % (STATUS_LINE[status], lines)
        return kept


_beginnings = _AnswerBeginnings()


def next_wait(call: Coroutine[Any, Any, None]) -> Any:
    """Go on with a call that has no task; return what it waits for, or ENDED."""
    try:
        waited_for = call.send(None)
    except StopIteration:
        return ENDED
    return waited_for


@types.coroutine
def rest_of(call: Coroutine[Any, Any, None], waited_for: Any) -> Generator[Any, Any, None]:
    """The rest of a coroutine that was begun without a task, and waits for this."""
    while True:
        thrown, sent = None, None
        try:
            sent = yield waited_for
        except BaseException as error:  # noqa: BLE001 - the coroutine gets it
            thrown = error
        try:
            waited_for = call.send(sent) if thrown is None else call.throw(thrown)
        except StopIteration:
            return
