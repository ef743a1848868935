"""How a call is served: one route class does for every route what a handler need not know of.

A subject declares its routes as functions with typed parameters, as in any FastAPI application:

    router = PoolRouter(tags=("leases",), answered_by="leader")

    @router.put("/leases/{lease_id:path}", caller=WRITER, problems=(409,))
    async def request_lease(call: Call, lease_id: LeaseId, form: LeaseForm, devices: Devices = "index") -> AnyLease: ...

The route decides whether this box or the leader of the fleet answers, checks who calls, reads the path, the query and the form
by their types, calls the function and encodes what it returns. Every error becomes one problem. FastAPI describes the same
functions in the OpenAPI document.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal, TypeVar, get_type_hints

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse
from starlette.responses import Response as HttpResponse
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from gpu_worker_pool.host.pauses import LoopShare
from gpu_worker_pool.server.authority.presence import ClientGone
from gpu_worker_pool.server.encoding import encode
from gpu_worker_pool.wire.service import Problem

from .access import Caller, Denied
from .call import Call
from .forwarding import Forwarding, leader_answers
from .front import PIECE_BYTES, READABLE, answer_preflight, is_preflight
from .response import Headers, Refusal, Response, problem_of
from .validation import adapter_of, read_form, read_query, read_text

# Who may make a call. ANYONE: also a caller that is not identified. WRITER: on the server's machine, or with a token.
ANYONE: Final = "anyone"
WRITER: Final = "writer"
OPERATOR: Final = "operator"
ADMIN: Final = "admin"
CallerKind = Literal["anyone", "writer", "operator", "admin"]
AnsweredBy = Literal["box", "leader", "custodian"]

# The refusals of every writing call, before it is carried out.
WRITING = (400, 401, 403, 408, 413, 415, 422, 429, 503)
PROBLEM_JSON = "application/problem+json"
STOPPING = (
    "The server is stopping; ask again when it is back. The call may have taken effect; repeating it is harmless."
)
# An answer that is sent in pieces must be taken within this time.
ANSWER_S = 60.0

EndpointT = TypeVar("EndpointT", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Declared:
    """One route, as its subject declares it.

    `help` is its text on the home page. `ignores_query`: unknown parameters of the query are ignored. `answered_by` says who
    answers in a fleet: the `box` that is asked, the `leader`, to whom the box passes the call on, or the `custodian`, the box
    that keeps the lease. Without a leader the box answers what `is_known_to_box`. Calls that the leader answers exist twice: they mean the box that was asked, and with `is_fleet` the
    whole fleet. `headers` are on every answer, errors included. A web page of any origin may read a call that
    `is_readable_everywhere`, where CORS is on.
    """

    method: str
    path: str
    endpoint: Callable[..., Any]
    caller: CallerKind = ANYONE
    problems: tuple[int, ...] = ()
    tags: tuple[str, ...] = ()
    help: str | None = None
    ignores_query: bool = False
    answered_by: AnsweredBy = "box"
    is_known_to_box: bool = False
    is_fleet: bool = False
    headers: Headers = ()
    is_readable_everywhere: bool = False
    response_model: Any = None
    statuses: Mapping[int, str] = field(default_factory=lambda: {200: "Successful Response"})
    media_type: str | None = None
    is_documented: bool = True

    def for_fleet(self) -> Declared:
        """The same call, for the whole fleet."""
        return replace(self, path=f"/fleet{self.path}", help=None, is_fleet=True)


class PoolRouter:
    """The routes of one subject. Options are those of `Declared`, for all of its routes."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.declared: list[Declared] = []

    def get(self, path: str, **options: Any) -> Callable[[EndpointT], EndpointT]:
        return self._declare("GET", path, options)

    def put(self, path: str, **options: Any) -> Callable[[EndpointT], EndpointT]:
        return self._declare("PUT", path, options)

    def post(self, path: str, **options: Any) -> Callable[[EndpointT], EndpointT]:
        return self._declare("POST", path, options)

    def delete(self, path: str, **options: Any) -> Callable[[EndpointT], EndpointT]:
        return self._declare("DELETE", path, options)

    def _declare(self, method: str, path: str, options: Mapping[str, Any]) -> Callable[[EndpointT], EndpointT]:
        def declare(endpoint: EndpointT) -> EndpointT:
            given = {**self._options, **options}
            if method != "GET":
                given["problems"] = (*WRITING, *given.get("problems", ()))
            self.declared.append(Declared(method=method, path=path, endpoint=endpoint, **given))
            return endpoint

        return declare

    def add_to(self, app: FastAPI, *, prefix: str = "", is_fleet: bool = False, with_cors: bool = False) -> None:
        """Add the routes to an application; with `is_fleet`, those that mean the whole fleet."""
        for declared in self.declared:
            if is_fleet and (declared.answered_by == "box" or declared.is_fleet):
                continue
            given = declared.for_fleet() if is_fleet else declared
            if with_cors and given.is_readable_everywhere:
                given = replace(given, headers=(*given.headers, READABLE))
            app.router.add_api_route(
                f"{prefix}{given.path}",
                given.endpoint,
                methods=[given.method],
                name=f"fleet_{given.endpoint.__name__}" if given.is_fleet else given.endpoint.__name__,
                # Answers are encoded as they are. Their types are needed by the document only, and take long to make.
                response_model=None,
                include_in_schema=given.is_documented,
                route_class_override=partial(PoolRoute, declared=given),  # type: ignore[arg-type]
            )


class PoolRoute(APIRoute):
    """The route class of the server."""

    def __init__(self, path: str, endpoint: Callable[..., Any], *, declared: Declared, **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        # A line break in a path is part of a parameter, which refuses it in words, and never the end of the path. A parameter
        # that other text follows is not empty.
        pattern = self.path_regex.pattern.removesuffix("$").replace(".*)/", ".+)/")
        self.path_regex = re.compile(pattern + r"\Z", re.DOTALL)
        self.declared = declared
        hints = get_type_hints(endpoint, include_extras=True)
        signature = inspect.signature(endpoint).parameters
        self._answer_type = declared.response_model or hints.get("return")
        self._form_type = hints.get("form")
        readers = {name: adapter_of(hints[name]) for name in signature if name not in {"call", "form"}}
        self._in_path = {name: readers.pop(name) for name in self.param_convertors}
        self._in_query = {_alias(name, hints[name]): reader for name, reader in readers.items()}
        self._names = {_alias(name, hints[name]): name for name in readers}
        self.app = self._serve

    def documented(self) -> APIRoute:
        """The same route for the OpenAPI document, with the types of its answers."""
        declared, model = self.declared, self._answer_type
        is_typed = declared.media_type is None
        responses: dict[int | str, dict[str, Any]] = {}
        for status, text in declared.statuses.items():
            responses[status] = {"description": text}
            if not is_typed:
                responses[status]["content"] = {declared.media_type: {}}
            elif status < 300:
                responses[status]["model"] = model
        problem = {"schema": {"$ref": f"#/components/schemas/{Problem.__name__}"}}
        summary, _, more = (inspect.getdoc(self.endpoint) or self.name).partition("\n")
        for status in declared.problems:
            responses[status] = {"description": "Problem", "content": {PROBLEM_JSON: problem}}
        return APIRoute(
            self.path,
            self.endpoint,
            methods=[declared.method],
            name=self.name,
            summary=summary.rstrip("."),
            description=more.strip() or " ",
            tags=list(declared.tags),
            response_model=model if is_typed else None,
            response_class=JSONResponse if is_typed else HttpResponse,
            responses=responses,
        )

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child_scope = super().matches(scope)
        is_head = match is Match.PARTIAL and scope["method"] == "HEAD" and self.declared.method == "GET"
        return Match.FULL if is_head else match, child_scope

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == self.declared.method or (scope["method"], self.declared.method) == ("HEAD", "GET"):
            await self._serve(scope, receive, send)
            return
        if READABLE in self.declared.headers and is_preflight(scope):
            await answer_preflight(scope, receive, send)
            return
        allowed = allowed_methods(scope)
        path = scope["path"][:200]
        refused = Refusal(405, f"{scope['method']} is not allowed at {path}; use {allowed}.", {"Allow": allowed})
        await write(problem_of(refused), self.declared.headers, scope, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope, receive)
        with suppress(ClientGone):
            await write(await self._answer_any(call), self.declared.headers, scope, send)

    async def _answer_any(self, call: Call) -> Response:
        """The answer to a call, or the problem that it ends with; ClientGone if the client has gone."""
        try:
            return await self._answer(call)
        except ClientGone:
            # A call that waits ends in the same way if its token is revoked, and its client is there.
            try:
                call.check_token()
            except Denied as revoked:
                return problem_of(revoked)
            raise
        except asyncio.CancelledError:
            if not call.is_stopping:
                raise
            # uvicorn ends the calls that are under way when it stops. It would answer them with a bare 500.
            return problem_of(Refusal(503, STOPPING, {"Retry-After": "1", "Connection": "close"}))
        except Exception as error:  # noqa: BLE001 - each is answered; our own faults are logged
            if isinstance(error, Denied) and error.hold_s > 0:
                await asyncio.sleep(error.hold_s)
            return problem_of(error)

    async def _answer(self, call: Call) -> Response:
        declared = self.declared
        if declared.tags:
            # Statistics and probes of monitoring are for all, and wait for no directory of users.
            await call.know_user()
        if leader_answers(call, declared.answered_by, is_fleet=declared.is_fleet):
            membership = call.pool.membership
            call.has_no_leader = membership is None or membership.leader is None
            if not (call.has_no_leader and declared.is_known_to_box and not declared.is_fleet):
                return await call.part(Forwarding).pass_on(call)
        if declared.caller != ANYONE:
            check_caller(call, declared.caller)
        arguments = {name: read_text(name, reader, call.path_params[name]) for name, reader in self._in_path.items()}
        query = read_query(call.raw_query, self._in_query, ignores_unknown=declared.ignores_query)
        arguments |= {self._names[alias]: value for alias, value in query.items()}
        if declared.method != "GET":
            body = await call.body()
            if self._form_type is not None:
                arguments["form"] = read_form(self._form_type, body)
            elif body and declared.method == "DELETE":
                # What a caller says must not be dropped in silence.
                raise Refusal(422, "DELETE takes no body; use query parameters instead.")
        answer = await self.endpoint(call=call, **arguments)
        if isinstance(answer, Response):
            return answer
        return Response(call.status, answer if isinstance(answer, bytes) else encode(answer))


def check_caller(call: Call, wanted: CallerKind) -> None:
    """Identify the caller; Denied if it may not make this call."""
    caller = call.caller()
    if wanted == ADMIN and not caller.is_admin:
        raise _denied(caller, "an administrator", call.rules.administrators)
    if wanted == OPERATOR and not caller.is_operator:
        raise _denied(caller, "an operator or an administrator", call.rules.operators)


def _denied(caller: Caller, wanted: str, local: str) -> Denied:
    you = "" if caller.name is None else f" You are {caller.name}, in the role of {caller.role}."
    return Denied(
        403,
        f"Only {wanted} may do this: on the server's machine {local}, and from everywhere a caller with a token of that "
        f"role (gpu-pool token add NAME --role ROLE).{you}",
    )


def allowed_methods(scope: Scope) -> str:
    """The methods at the path of a call."""
    found = [
        "GET, HEAD" if route.declared.method == "GET" else route.declared.method
        for route in scope["app"].routes
        if isinstance(route, PoolRoute) and route.path_regex.match(scope["path"])
    ]
    return ", ".join(dict.fromkeys(found))


def _alias(name: str, hint: Any) -> str:
    """The name of a parameter in the query: that of Python may be reserved."""
    for one in getattr(hint, "__metadata__", ()):
        if (alias := getattr(one, "alias", None)) is not None:
            return str(alias)
    return name


async def write(response: Response, added: Headers, scope: Scope, send: Send) -> None:
    """Send an answer. A long one is sent in pieces, each once the caller has taken most of those before it: a caller that
    reads slowly costs a piece, not a copy of the answer.
    """
    status, body, headers = response
    is_head = scope["method"] == "HEAD"
    if not isinstance(body, bytes):
        await _stream(body, {"status": status, "headers": [*headers, *added]}, send, is_head=is_head)
        return
    length = () if status == 304 else ((b"content-length", b"%d" % len(body)),)
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *added, *length]})
    if len(body) <= PIECE_BYTES or is_head:
        await send({"type": "http.response.body", "body": body})
        return
    share = LoopShare()
    with suppress(TimeoutError):  # the server closes a connection whose answer is not complete
        async with asyncio.timeout(ANSWER_S):
            for start in range(0, len(body), PIECE_BYTES):
                await share.yield_if_due()
                piece = body[start : start + PIECE_BYTES]
                more = start + PIECE_BYTES < len(body)
                await send({"type": "http.response.body", "body": piece, "more_body": more})


async def _stream(body: AsyncGenerator[bytes, None], start: dict[str, Any], send: Send, *, is_head: bool) -> None:
    await send({"type": "http.response.start", **start})
    async with aclosing(body) as pieces:
        if not is_head:
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
