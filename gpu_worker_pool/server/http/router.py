"""Routes all calls by the route table: methods, CORS, problems, and writing the response."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import aclosing, suppress
from functools import partial
from urllib.parse import quote

from starlette.types import ASGIApp, Receive, Scope, Send

from gpu_worker_pool.host.users import Users
from gpu_worker_pool.wire.routes import Resource

from .accept import wants_page
from .access import AccessRules, hold_back
from .bodies import ClientGone
from .call import Call, Handler, Handlers
from .exchange import EXCHANGE, Exchange
from .fleet_routing import FleetRouting
from .head import check_head
from .loop_share import LoopShare
from .polls import PolledRequests
from .problems import Refusal, problem_of
from .response import JSON, Headers, Response
from .route_index import RouteIndex, RouteMatch
from .time_limits import TimeLimits

logger = logging.getLogger(__name__)

READABLE = (b"access-control-allow-origin", b"*")
# A longer answer is sent in pieces of this size, and must be taken within this time.
PIECE_BYTES = 64 * 1024
ANSWER_S = 60.0
READING = frozenset({"GET", "HEAD"})
PROMPT = frozenset({"PUT", "DELETE"})


class Router:
    """Finds the handler of a call and writes its response. Every answer of the page has the `page_headers`."""

    def __init__(
        self,
        table: Iterable[Resource],
        handlers: Iterable[Handlers],
        *,
        prefix: str,
        rules: AccessRules,
        users: Users,
        enable_cors: bool,
        page_headers: Headers,
        fleet: FleetRouting | None = None,
    ) -> None:
        self._index = RouteIndex(table, handlers, prefix=prefix)
        self._polled = self._index.polled
        self._prefix = prefix
        self._leases = f"{prefix}/leases/"
        self._rules = rules
        self._users = users
        self._limits = TimeLimits()
        # Ends the time limits of all calls that are under way.
        self.stop = self._limits.stop
        self._page_headers = page_headers
        self._fleet = fleet or FleetRouting()
        self._enable_cors = enable_cors
        self._readable: Headers = (READABLE,) if enable_cors else ()
        self.polls = PolledRequests(self._polled, (*JSON, *self._readable), PIECE_BYTES)

    def is_prompt(self, method: str, path: str) -> bool:
        """Whether a call may begin without a task: until it waits, nothing in it needs one. See exchange.py."""
        if method in READING:
            return path in self._polled
        return method in PROMPT and path.startswith(self._leases)

    def lease_app(self, method: str, path: str) -> ASGIApp | None:
        """What answers a call for a lease whose head is known, on a server without a fleet; None if it is another call."""
        if method not in PROMPT:
            return None
        match = next((each for each in self._index.find(path) if method in each.handlers), None)
        # An address below that of a lease is read as an id too, which is refused.
        if match is None or match.parameters != {"lease_id": path.rpartition("/")[2]}:
            return None
        return partial(self._answer_known, match.handlers[method])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        polled = self._polled.get(path)
        if polled is not None and method in READING:
            response = Response(200, polled())
            if method == "HEAD" or not _write_at_once(response, self._readable, scope):
                await _write(response, self._readable, send)
            return
        try:
            check_head(scope)
        except Refusal as refused:
            await _write(problem_of(refused), (), send, is_head=method == "HEAD")
            return
        matches = self._index.find(path)
        call = Call(scope, receive, self._rules, self._users, self._limits)
        redirected = None if matches else self._redirect_to_prefix(path, call)
        if redirected is not None and method in READING:
            await _write(redirected, (), send)
            return
        resource = matches[0].resource if matches else None
        cors = ("asks" if resource is None else resource.cors) if self._enable_cors else "never"
        is_preflight = method == "OPTIONS" and {"origin", "access-control-request-method"} <= call.headers.keys()
        if is_preflight and cors != "never":
            await _answer_preflight(scope, receive, send)
            return
        try:
            response = await self._answer_client("GET" if method == "HEAD" else method, matches, call)
        except ClientGone:
            return
        except Exception as error:  # noqa: BLE001 - each is answered; our own faults are logged
            await hold_back(error)
            response = problem_of(error)
        added = self._added(resource, method)
        if cors == "asks":
            response, added = _readable_if_asked(response, added, is_asked="origin" in call.headers)
        if method == "HEAD" or not _write_at_once(response, added, scope):
            await _write(response, added, send, is_head=method == "HEAD", limits=self._limits)

    async def _answer_known(self, handler: Handler, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a call for a lease whose head was read and routed before. Its answer needs no headers but its own."""
        call = Call(scope, receive, self._rules, self._users, self._limits)
        try:
            await call.know_user()
            response = await handler(call)
        except ClientGone:
            return
        except Exception as error:  # noqa: BLE001 - as above
            response = problem_of(error)
        if not _write_at_once(response, (), scope):
            await _write(response, (), send, limits=self._limits)

    async def _answer_client(self, method: str, matches: list[RouteMatch], call: Call) -> Response:
        try:
            return await self._answer(method, matches, call)
        except ClientGone:
            # A call that waits ends in the same way if its token is revoked, and its client is there.
            call.check_token()
            raise

    async def _answer(self, method: str, matches: list[RouteMatch], call: Call) -> Response:
        for match in matches:
            handler = match.handlers.get(method)
            if handler is not None:
                call.parameters = match.parameters
                if match.resource.tag or method not in READING:
                    # Statistics and probes of monitoring are for all, and wait for no directory of users.
                    await call.know_user()
                return await self._fleet.answer(match.resource, handler, call)
        path = call.scope["path"]
        if not matches:
            shorter = path.rstrip("/")
            if shorter != path and any(not match.resource.tag for match in self._index.find(shorter)):
                query = call.scope.get("query_string", b"").decode("latin-1")
                # Relative: the Host header is the caller's, and a proxy may use other addresses.
                return redirect(f"../{quote(shorter.rpartition('/')[2])}{'?' if query else ''}{query}")
            raise Refusal(404, f"There is nothing at {path[:200]}; {self._prefix}/ lists all calls.")
        allowed = ", ".join(dict.fromkeys(known for match in reversed(matches) for known in match.handlers))
        is_page = matches[0].resource.tag == "page"
        detail = f"{method} is not allowed at {path[:200]}; use {allowed}."
        raise Refusal(405, detail, {"Allow": "GET, HEAD" if is_page else allowed})

    def _redirect_to_prefix(self, path: str, call: Call) -> Response | None:
        """Redirect from above the prefix to below it. The target is relative, because a proxy may use other addresses."""
        prefix, vary = self._prefix, (b"vary", b"Accept")
        if prefix and path == prefix:
            return redirect(f"{prefix.rpartition('/')[2]}/", vary)
        is_for_page = prefix and path == "/" and wants_page(call.headers.get("accept"))
        return redirect(f"{prefix.lstrip('/')}/ui", vary) if is_for_page else None

    def _added(self, resource: Resource | None, method: str) -> Headers:
        if resource is None:
            return ()
        if resource.tag == "page":
            return self._page_headers
        return self._readable if resource.cors == "always" and method in READING else ()


def redirect(location: str, *headers: tuple[bytes, bytes]) -> Response:
    return Response(307, b"", (*headers, (b"location", location.encode("latin-1"))))


def _write_at_once(response: Response, added: Headers, scope: Scope) -> bool:
    """Write an answer in JSON with one write; False if that cannot be done."""
    exchange: Exchange | None = scope.get(EXCHANGE)
    status, body, headers = response
    if exchange is None or headers is not JSON or not isinstance(body, bytes) or len(body) > PIECE_BYTES:
        return False
    return exchange.answer(status, (*headers, *added), body)


async def _write(
    response: Response, added: Headers, send: Send, *, is_head: bool = False, limits: TimeLimits | None = None
) -> None:
    status, body, headers = response
    if isinstance(body, bytes | list):
        parts = [body] if isinstance(body, bytes) else body
        size = sum(map(len, parts))
        length = () if status == 304 else ((b"content-length", b"%d" % size),)
        await send({"type": "http.response.start", "status": status, "headers": [*headers, *added, *length]})
        if size <= PIECE_BYTES or is_head:
            await send({"type": "http.response.body", "body": b"".join(parts)})
            return
        # Each piece waits until the caller has taken most of those before it. So a caller that reads slowly costs a piece,
        # not a copy of the answer.
        with suppress(TimeoutError):
            async with (limits or TimeLimits()).within(ANSWER_S):
                share, left = LoopShare(), size
                for piece in _pieces(parts):
                    # A caller on this machine takes megabytes as fast as they are sent, and would hold the event loop.
                    await share.yield_if_due()
                    left -= len(piece)
                    await send({"type": "http.response.body", "body": piece, "more_body": left > 0})
                return
        # The server closes a connection whose answer is not complete.
        logger.warning("a caller did not take its answer of %d bytes within %g s; it is cut off", size, ANSWER_S)
        return
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *added]})
    async with aclosing(body) as pieces:
        if not is_head:
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _pieces(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The parts; a long one in several pieces."""
    for part in parts:
        for start in range(0, len(part), PIECE_BYTES):
            yield part[start : start + PIECE_BYTES]


def _readable_if_asked(response: Response, added: Headers, *, is_asked: bool) -> tuple[Response, Headers]:
    """Let a page of any origin read the answer if its browser asks. Caches are told that this makes a difference."""
    varies = [value for name, value in response.headers if name == b"vary"]
    if varies:
        response = response._replace(headers=tuple(item for item in response.headers if item[0] != b"vary"))
    return response, (*added, *((READABLE,) if is_asked else ()), (b"vary", b", ".join((*varies, b"Origin"))))


async def _answer_preflight(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer the question of a browser whether a page of another origin may call."""
    from starlette.datastructures import Headers as RequestHeaders  # noqa: PLC0415 - few servers are asked this
    from starlette.middleware.cors import CORSMiddleware  # noqa: PLC0415 - as above

    # GET only, and never with credentials: a page of any origin may read, none may write.
    rules = CORSMiddleware(_unused_app, allow_origins=["*"], allow_methods=sorted(READING))
    await rules.preflight_response(RequestHeaders(scope=scope))(scope, receive, send)


async def _unused_app(*_: object) -> None:
    raise AssertionError("only its headers are used")
