"""Routes all calls by the route table: methods, CORS, problems, and writing the response."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from urllib.parse import quote

from starlette.types import Receive, Scope, Send

from gpu_worker_pool.host.users import Users
from gpu_worker_pool.server.authority.presence import ClientGone
from gpu_worker_pool.wire.routes import Resource

from .accept import wants_page
from .access import AccessRules
from .call import Call, Handlers
from .fleet_routing import leader_answers
from .forwarding import Forwarding
from .front import check_head
from .pool_route import write
from .problems import Refusal, problem_of
from .response import Headers, Response, redirect
from .route_index import RouteIndex, RouteMatch

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
    ) -> None:
        self._index = RouteIndex(table, handlers, prefix=prefix)
        self._prefix = prefix
        self._leases = f"{prefix}/leases/"
        self._rules = rules
        self._users = users
        self._page_headers = page_headers
        self._enable_cors = enable_cors
        self._readable: Headers = (READABLE,) if enable_cors else ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        try:
            check_head(scope)
        except Refusal as refused:
            await write(problem_of(refused), (), scope, send)
            return
        matches = self._index.find(path)
        call = Call(scope, receive)
        redirected = None if matches else self._redirect_to_prefix(path, call)
        if redirected is not None and method in READING:
            await write(redirected, (), scope, send)
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
            response = problem_of(error)
        added = self._added(resource, method)
        if cors == "asks":
            response, added = _readable_if_asked(response, added, is_asked="origin" in call.headers)
        await write(response, added, scope, send)

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
                if leader_answers(call, match.resource.answered_by, is_fleet=match.resource.is_fleet):
                    return await call.part(Forwarding).pass_on(call)
                return await handler(call)
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
