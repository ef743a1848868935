"""uvicorn's HTTP, with bounds on the time and the size of a request's head, and on the time to take the answer. A head that
is not valid is answered as every other error is.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from functools import partial
from typing import Any, NoReturn

from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gpu_worker_pool.server.access_log import call_logger

from .connection import KEY, Connection
from .exchange import ENDED, EXCHANGE, Exchange, next_wait, rest_of
from .head import CLOSE, size_of
from .known_heads import KnownCall, KnownHeads
from .loop_share import TurnQueue
from .polls import PolledAnswer, PolledRequests
from .problems import Refusal, problem_of

# No honest client sends a larger head, or takes longer.
HEAD_S = 5.0
MAX_HEAD_BYTES = 64 * 1024
# A caller that takes nothing of its answer, or of its stream, for so long is cut off.
STALLED_S = 20.0
TOO_LARGE = f"The head of the request is larger than {MAX_HEAD_BYTES} bytes; send fewer or shorter headers."
INVALID = "The request is not valid HTTP: its method is not known, or its first line or a header is malformed."
_AUTHORITY = re.compile(rb"[^/?#]*://([^/?#]*)")


class BoundedProtocol(HttpToolsProtocol):
    """Closes a connection whose head is not complete in time, or too large. `read_body` bounds the bodies."""

    stalled_s = STALLED_S
    # The only path at which a WebSocket may be opened; None: nowhere.
    websocket_path: bytes | None = None
    # Requests that are known by their bytes.
    polls = PolledRequests({}, (), 0)
    # Calls of pages, which begin a few at a time: a hundred of them must not hold up a lease.
    page_calls: TurnQueue | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._log_call = call_logger(self.access_logger)
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._is_in_head = True
        self._why_invalid = INVALID
        # The call that is answered now. `cycle` is the one that came last: a client may send several without waiting.
        self._answered: RequestResponseCycle | None = None
        self._is_reading = False
        # A call whose head has just been read. It begins when all that has arrived is read: then its body is here too.
        self._due: tuple[RequestResponseCycle, Any] | None = None
        self._heads = KnownHeads()
        self._idle_since = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connection = Connection.of_transport(transport)
        self._shown_client = ":".join(map(str, self.client or ()))
        self._head_timer = self.loop.call_later(HEAD_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_stall_timer()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        super().connection_lost(exc)
        if self._answered is not None:
            self._answered.disconnected = not self._answered.response_complete
            self._answered.message_event.set()
            exchange: Exchange | None = self._answered.scope.get(EXCHANGE)  # type: ignore[assignment]
            if exchange is not None:
                exchange.note_disconnect()

    def data_received(self, data: bytes) -> None:
        is_between = self._is_between_requests
        if is_between:
            if (poll := self.polls.find(data)) is not None and self._answer_poll(poll):
                return
            if (known := self._heads.find(data)) is not None:
                self._begin_known(known)
                return
        self._is_reading = True
        super().data_received(data)
        self._is_reading = False
        if self._due is not None:
            due, self._due = self._due, None
            if is_between:
                self._learn(data, due[0].scope)  # type: ignore[arg-type]
            self._begin(*due)
        if self._is_in_head:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(HEAD_S, self.transport.close)
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._why_invalid = TOO_LARGE
                self.send_400_response(TOO_LARGE)

    @property
    def _is_between_requests(self) -> bool:
        """Whether all requests before are answered, and the next byte begins another one."""
        last: RequestResponseCycle | None = self.cycle
        return not self._head_bytes and (last is None or (last.response_complete and not last.more_body))

    def _learn(self, data: bytes, scope: Scope) -> None:
        """Know these bytes from now on, if they are a request that is sent again and again."""
        self.polls.learn(data, scope)
        method, path = scope["method"], scope["path"]
        app = self.lease_app(method, path) if self.is_prompt(method, path) else None
        if app is not None:
            self._heads.learn(data, scope, self._connection, app)

    def _answer_poll(self, poll: PolledAnswer) -> bool:
        """Answer a polled request that is known by its bytes; False if it must be read."""
        if self.flow.write_paused or (whole := poll.whole(self.server_state.default_headers)) is None:
            return False
        if self._head_timer is not None:
            self._stop_timer()
        if self.access_log:
            self._log_call(self._shown_client, "GET", poll.path, "1.1", 200)
        self.transport.write(whole)
        self.on_response_complete()
        return True

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's text says less than ours
        """Answer with a problem, and close the connection."""
        status, body, headers = problem_of(Refusal(400, self._why_invalid, CLOSE))
        assert isinstance(body, bytes)  # noqa: S101 - a problem is not a stream
        own = [*self.server_state.default_headers, *headers, (b"content-length", b"%d" % len(body))]
        lines = [b"HTTP/1.1 %d Bad Request" % status, *(name + b": " + value for name, value in own)]
        self.transport.write(b"\r\n".join([*lines, b"", body]))
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[KEY] = self._connection  # type: ignore[literal-required]
        self._is_in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Check the head. An error raised here is answered with 400."""
        self._stop_timer()
        self._is_in_head, self._head_bytes = False, 0
        if size_of(self.headers) > MAX_HEAD_BYTES:
            self._refuse(TOO_LARGE)
        self._check_authority()
        super().on_headers_complete()
        if self._answered is None or self._answered.response_complete:
            self._answered = self.cycle

    def on_response_complete(self) -> None:
        """Begin the next call, if there is one. Else the connection is idle: then a timer for each answer is not needed."""
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._watch_idleness(self.timeout_keep_alive)

    def _watch_idleness(self, after_s: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(after_s, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle for so long. The next answer watches one that is not idle."""
        self.timeout_keep_alive_task = None
        left_s = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left_s <= 0 and self._is_between_requests:
            super().timeout_keep_alive_handler()
        elif left_s > 0:
            self._watch_idleness(left_s)

    def _unset_keepalive_if_required(self) -> None:
        """Do nothing: the timer itself finds out whether the connection was idle."""

    def is_prompt(self, method: str, path: str) -> bool:  # noqa: ARG002 - for the application to say
        """Whether a call may begin without a task."""
        return False

    def lease_app(self, method: str, path: str) -> ASGIApp | None:  # noqa: ARG002 - for the application to say
        """What answers a call for a lease that may begin without a task; None if it is another call."""
        return None

    def is_for_page(self, path: str) -> bool:  # noqa: ARG002 - for the application to say
        """Whether only pages make this call."""
        return False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cycle.scope[EXCHANGE] = Exchange(cycle, self._log_call)  # type: ignore[literal-required]
        if self._is_reading:
            self._due = cycle, app
        else:
            super()._start_asgi_task(cycle, app)

    def _begin(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Begin to answer a call."""
        exchange: Exchange = cycle.scope[EXCHANGE]  # type: ignore[literal-required]
        method, path = cycle.scope["method"], cycle.scope["path"]
        if not exchange.has_arrived or not self.is_prompt(method, path):
            if self.page_calls is not None and self.is_for_page(path):
                self.page_calls.add(partial(super()._start_asgi_task, cycle, app))
            else:
                super()._start_asgi_task(cycle, app)
            return
        self._go_on(cycle.run_asgi(app))

    def _begin_known(self, known: KnownCall) -> None:
        """Begin to answer a call whose head is known."""
        if self._head_timer is not None:
            self._stop_timer()
        cycle = RequestResponseCycle(
            scope=known.scope(),  # type: ignore[arg-type]
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=True,
            on_response=self.on_response_complete,
        )
        cycle.more_body = False
        cycle.scope[EXCHANGE] = Exchange(cycle, self._log_call)  # type: ignore[literal-required]
        self.cycle = self._answered = cycle
        self._go_on(cycle.run_asgi(known.head.app))  # type: ignore[arg-type]

    def _go_on(self, call: Coroutine[Any, Any, None]) -> None:
        """Begin a call without a task. It gets one when it waits."""
        waited_for = next_wait(call)
        if waited_for is not ENDED:
            task = self.loop.create_task(rest_of(call, waited_for))
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)

    def _should_upgrade_to_ws(self) -> bool:
        return self.websocket_path is not None and self.url.partition(b"?")[0] == self.websocket_path

    def pause_writing(self) -> None:
        """Cut off a caller that takes nothing of its answer for so long: what is buffered for it is not freed otherwise."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self.stalled_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stall_timer()

    def _check_authority(self) -> None:
        """Refuse an address that names another host than the Host header, by which the access rules decide."""
        if found := _AUTHORITY.match(self.url):
            hosts = [value.lower() for name, value in self.headers if name == b"host"]
            if hosts != [found[1].lower()]:
                shown = found[1][:100].decode("ascii", "backslashreplace")
                self._refuse(f"The address names the host {shown!r}, and the Host header does not; make them the same.")

    def _refuse(self, why: str) -> NoReturn:
        """End the reading of a head. uvicorn answers an error with `send_400_response`."""
        self._why_invalid = why
        raise ValueError(why)

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
