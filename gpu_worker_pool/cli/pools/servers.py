"""Calls to the GPU servers, for every command that is not a worker itself."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from time import monotonic
from typing import Any, Final, Self, TypeVar
from urllib.parse import urlsplit

from gpu_worker_pool.cli.output import plain
from gpu_worker_pool.cli.tasks import cancel_and_wait
from gpu_worker_pool.client.http.transport import CallFailed, Transport, gather_with_grace
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.failure import FAILED, REFUSED, USAGE, Failure
from gpu_worker_pool.host.addresses import is_this_machine
from gpu_worker_pool.urls import split_endpoints
from gpu_worker_pool.wire.reader import has_all, read

T = TypeVar("T")
FLEET: Final = "/fleet"
# Calls that exist for a box and for its whole fleet.
_OF_POOLS: Final = (
    "/pool",
    "/leases",
    "/usage",
    "/timeline",
    "/quotas",
    "/groups",
    "/bookings",
    "/forecast",
    "/admin/",
)
# How long the others are waited for, at least, when one server has answered.
GRACE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """What a server answered, or why there is no answer."""

    endpoint: str
    url: str
    status: int | None = None
    data: Any = None
    error: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.error is None

    @property
    def why_not(self) -> str:
        """The error, with the status of the answer if there was one."""
        error = str(self.error).rstrip(".? ")
        return error if self.status is None or str(self.status) in error else f"{error} (status {self.status})"


class Servers:
    """All configured endpoints, asked side by side: one that is silent does not delay the others.

    `is_fleet`: calls mean the whole fleet that an endpoint belongs to; at one that belongs to none, that server.
    """

    def __init__(
        self,
        endpoints: Sequence[str] | None = None,
        *,
        timeout_s: float | None = None,
        is_fleet: bool = False,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        urls = split_endpoints(list(endpoints or ()))
        if endpoints and not urls:
            raise Failure("--endpoint is empty; give it a URL, such as http://localhost:8000", USAGE)
        named: dict[str, Any] = {"service_endpoint": urls[0]} if len(urls) == 1 else {"service_endpoints": urls}
        try:
            self.config = ClientConfig.build(**(named if urls else {}), environ=environ)
        except ValueError as error:
            raise Failure(re.sub("^service_endpoints?", "--endpoint", str(error)), USAGE) from None
        self.is_fleet = is_fleet
        # What goes before the path of a call that means a pool, by endpoint.
        self._scopes: dict[str, str] = {}
        self._timeout_s = self.config.endpoint_timeout if timeout_s is None else timeout_s
        self._transport = Transport(
            ca_file=self.config.ca_file, is_named=self.config.is_named, environ=self.config.environ
        )

    async def __aenter__(self) -> Self:
        try:
            await self._transport.open()
        except ValueError as error:
            raise Failure(str(error), USAGE) from None
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._transport.close()

    def run(self, work: Callable[[Self], Coroutine[Any, Any, T]]) -> T:
        """The result of this work with the servers, for a command that is not in an event loop."""

        async def opened() -> T:
            async with self:
                return await work(self)

        return asyncio.run(opened())

    @property
    def ids(self) -> list[str]:
        return list(self.config.endpoints)

    async def ask(
        self, endpoint: str, path: str, method: str = "GET", body: Mapping[str, Any] | None = None
    ) -> ServerAnswer:
        """One call to one endpoint. Never raises for what the server does: see the answer's error."""
        url = self.config.endpoints[endpoint].url
        scope = await self._scope(endpoint) if self.is_fleet and path.startswith(_OF_POOLS) else ""
        return await self._call(endpoint, url, f"{scope}{path}", method, body)

    async def ask_url(self, url: str, path: str) -> ServerAnswer:
        """A GET to a server that is not among the endpoints. No token is sent: it is for the endpoints."""
        return await self._call("", url.rstrip("/"), path, "GET", None)

    def is_scope_fleet(self, endpoint: str) -> bool:
        """Whether calls to this endpoint, which has been asked, meant its whole fleet."""
        return bool(self._scopes.get(endpoint))

    async def _scope(self, endpoint: str) -> str:
        """The calls of the whole fleet, if this server belongs to one."""
        if endpoint not in self._scopes:
            answer = await self._call(endpoint, self.config.endpoints[endpoint].url, "/health", "GET", None)
            data = answer.data if isinstance(answer.data, dict) else {}
            if "fleet" not in data and answer.status is None:
                return FLEET  # it does not answer; the call itself says so
            self._scopes[endpoint] = FLEET if data.get("fleet") else ""
        return self._scopes[endpoint]

    async def _call(
        self, endpoint: str, url: str, path: str, method: str, body: Mapping[str, Any] | None
    ) -> ServerAnswer:
        try:
            reply = await self._transport.call(
                method, url, path, body=body, token=self.config.tokens.get(endpoint), timeout_s=self._timeout_s
            )
        except CallFailed as failed:
            return ServerAnswer(endpoint, url, error=str(failed))
        error = reply.detail if reply.status >= 400 else None
        return ServerAnswer(endpoint, url, reply.status, reply.data, error)

    async def ask_all(self, path: str) -> list[ServerAnswer]:
        """A GET to every endpoint, in the order they were given."""
        return await self.each(lambda endpoint: self.ask(endpoint, path), lambda late: late)

    async def each(
        self, ask: Callable[[str], Coroutine[Any, Any, T]], when_late: Callable[[ServerAnswer], T]
    ) -> list[T]:
        """What `ask` returns for each endpoint, in the order they were given.

        Once one has answered, the others have a moment left: a box that is silent delays nobody. For it, `when_late`
        makes the result from an answer that says so.
        """
        began = monotonic()
        asked = {endpoint: asyncio.create_task(ask(endpoint)) for endpoint in self.ids}
        try:
            late = await gather_with_grace(asked.values(), _is_answer, GRACE_S)
        finally:
            await cancel_and_wait(*asked.values())
        error = f"it has not answered within {monotonic() - began:.1f} s, while others have"
        return [
            when_late(ServerAnswer(endpoint, self.config.endpoints[endpoint].url, error=error))
            if task in late
            else task.result()
            for endpoint, task in asked.items()
        ]


def _is_answer(found: Any) -> bool:
    """Whether a server was reached, with whatever answer."""
    return found.error is None or found.status is not None


class NobodyAnswered(Failure):
    """No server can be used now. Where one was `reached`, it said why, and waiting will not help."""

    def __init__(self, message: str, *, is_reached: bool) -> None:
        super().__init__(message)
        self.is_reached = is_reached


def nobody_answered(answers: Sequence[ServerAnswer]) -> NobodyAnswered:
    reasons = "; ".join(f"{answer.endpoint} ({answer.url}): {answer.why_not}" for answer in answers)
    start = "Start one with `gpu-pool serve`, or name" if any(answer.status is None for answer in answers) else "Name"
    return NobodyAnswered(
        f"no GPU server can be used: {reasons}. {start} another one with --endpoint; `gpu-pool doctor` looks closer.",
        is_reached=all(answer.status is not None for answer in answers),
    )


def one_server(endpoints: Sequence[str] | None, *, is_fleet: bool = False, timeout_s: float | None = None) -> Servers:
    """The server that an operator's command talks to; Failure where several are configured."""
    servers = Servers(endpoints, timeout_s=timeout_s, is_fleet=is_fleet)
    if len(servers.ids) > 1:
        raise Failure(
            f"there are {len(servers.ids)} servers ({', '.join(servers.ids)}); name one with --endpoint", USAGE
        )
    return servers


def ask_one(
    endpoints: Sequence[str] | None,
    path: str,
    method: str = "GET",
    body: Mapping[str, Any] | None = None,
    *,
    what: str,
    is_fleet: bool = False,
    timeout_s: float | None = None,
) -> ServerAnswer:
    """One call to the one server, for a command that needs no other; Failure as `call` has it."""
    servers = one_server(endpoints, is_fleet=is_fleet, timeout_s=timeout_s)
    return servers.run(lambda opened: call(opened, path, method, body, what=what))


async def call(
    servers: Servers, path: str, method: str = "GET", body: Mapping[str, Any] | None = None, *, what: str
) -> ServerAnswer:
    """One call to the one server; Failure where it is not done, which begins with `what`: `the quota was not set`."""
    answer = await servers.ask(servers.ids[0], path, method, body)
    if not answer.is_ok:
        raise failure_of(answer, f"{what}: {plain(answer.error)}")
    return answer


def read_answer(kind: type[T], answer: ServerAnswer, *lists: str) -> T:
    """What the server answered, in plain text. Failure where it makes no sense, or where not all of these lists can be read."""
    view = read(kind, answer.data, clean=plain)
    if view is None or not has_all(view, answer.data, *lists):
        raise Failure(f"the answer of {answer.url} cannot be read; is it a GPU server of another version?")
    return view


def failure_of(answer: ServerAnswer, message: str) -> Failure:
    """The failure for a call that was refused, or that no server answered."""
    if answer.status is None:
        return Failure(f"{message}; is {answer.url} a running GPU server? `gpu-pool doctor` looks closer")
    if answer.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        message += f" {_how_to_log_in(answer.url)}"
    if answer.status == HTTPStatus.NOT_FOUND and not _is_ours(answer):
        return Failure(f"{message}. {answer.url} is not a GPU server with leases; run `gpu-pool serve` there")
    return Failure(message, FAILED if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR else REFUSED)


def _is_ours(answer: ServerAnswer) -> bool:
    """Whether a server of ours says that there is no such thing; any other does not know the call."""
    return isinstance(answer.data, dict) and answer.data.get("detail") not in {None, "Not Found"}


def _how_to_log_in(url: str) -> str:
    if is_this_machine(urlsplit(url).hostname or ""):
        return "On this machine, root and the server's own user may: use sudo, or set GPU_POOL_TOKEN."
    return "Log in with a token that may do this (`gpu-pool login`), or set GPU_POOL_TOKEN."
