"""Calls to the GPU servers, for every command that is not a worker itself."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final, Self, TypeVar

from gpu_worker_pool.cli.failure import USAGE, Failure
from gpu_worker_pool.cli.tasks import cancel_and_wait
from gpu_worker_pool.client.http.grace import gather_with_grace
from gpu_worker_pool.client.http.transport import CallFailed, Transport
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.urls import split_endpoints

from .naming import Naming

T = TypeVar("T")
FLEET: Final = "/fleet"
# Calls that exist for a box and for its whole fleet.
_OF_POOLS: Final = ("/pool", "/leases", "/usage", "/timeline", "/quotas", "/bookings", "/admin/")
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
    took_s: float = 0.0
    date: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.error is None

    @property
    def why_not(self) -> str:
        """The error, with the status of the answer if there was one."""
        error = str(self.error).rstrip(".? ")
        return error if self.status is None or str(self.status) in error else f"{error} (status {self.status})"


def client_options(endpoints: Sequence[str] | None) -> dict[str, Any]:
    """The client's parameters for the values of --endpoint; several URLs make it a client of many endpoints."""
    urls = split_endpoints(list(endpoints or ()))
    if endpoints and not urls:
        raise Failure("--endpoint is empty; give it a URL, such as http://localhost:8000", USAGE)
    if not urls:
        return {}
    return {"service_endpoint": urls[0]} if len(urls) == 1 else {"service_endpoints": urls}


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
        try:
            self.config = ClientConfig.build(**client_options(endpoints), environ=environ)
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

    def naming(self, endpoint: str) -> Naming:
        """How the GPUs of an endpoint that has been asked are called."""
        return Naming(endpoint, self.config.is_multi, bool(self._scopes.get(endpoint)))

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
                method, f"{url}{path}", body=body, token=self.config.tokens.get(endpoint), timeout_s=self._timeout_s
            )
        except CallFailed as failed:
            return ServerAnswer(endpoint, url, error=str(failed))
        error = reply.detail if reply.status >= 400 else None
        return ServerAnswer(endpoint, url, reply.status, reply.data, error, reply.took_s, reply.date)

    async def ask_all(
        self, path: str, grace_s: float = GRACE_S, can_miss: Callable[[str], bool] = lambda _: False
    ) -> list[ServerAnswer]:
        """A GET to every endpoint, in the order they were given. For those that the caller `can_miss`, see `gather_with_grace`."""
        return await self.each(lambda endpoint: self.ask(endpoint, path), lambda late: late, grace_s, can_miss)

    async def each(
        self,
        ask: Callable[[str], Coroutine[Any, Any, T]],
        when_late: Callable[[ServerAnswer], T],
        grace_s: float = GRACE_S,
        can_miss: Callable[[str], bool] = lambda _: False,
    ) -> list[T]:
        """What `ask` returns for each endpoint, in the order they were given.

        Once one has answered, the others have a moment left: a box that is silent delays nobody. For it, `when_late`
        makes the result from an answer that says so.
        """
        began = monotonic()
        asked = {endpoint: asyncio.create_task(ask(endpoint), name=endpoint) for endpoint in self.ids}
        try:
            late = await gather_with_grace(asked.values(), _is_answer, grace_s, lambda task: can_miss(task.get_name()))
        finally:
            await cancel_and_wait(*asked.values())
        error = f"it has not answered within {monotonic() - began:.1f} s, and others have"
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


def find_endpoint(gpu: str, endpoints: list[str]) -> tuple[str, str]:
    """The endpoint of a GPU that is named `2` or `server1:2`, and its name there."""
    endpoint, colon, local = gpu.rpartition(":")
    if colon and local and endpoint in endpoints:
        return endpoint, local
    if len(endpoints) == 1 and not colon and gpu:
        return endpoints[0], gpu
    known = ", ".join(endpoints)
    if colon and local and len(endpoints) == 1:
        why = f"the server asked is {known}, not {endpoint}; write {local} for its GPU, or give the other's --endpoint"
    elif colon and local:
        why = f"{endpoint} is none of the servers asked: {known}"
    else:
        example = f"{endpoints[0]}:2" if len(endpoints) > 1 else "2"
        why = f"it names no GPU of {known}; write {example} as `gpu-pool status` shows it"
    raise Failure(f"{gpu!r}: {why}", USAGE)
