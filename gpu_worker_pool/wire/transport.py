"""The one way to call a server: bounded in time and size, no redirects, JSON only."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlsplit

from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.urls import DEFAULT_PORTS

from .connections import ConnectFailed, ServerConnection, Where, connect
from .http1 import AnswerReader, BadAnswer, encode
from .local_sockets import LocalSockets, judge_port, server_of, url_of_pool
from .reader import plain

MAX_BYTES = 16 * 1024 * 1024
COMPARE_S = 5.0
# A connection that was idle for longer is not used again: what is between may have forgotten it.
IDLE_S = 30.0
MOST_IDLE = 64
# May be made twice, so a connection that the server has just closed does no harm.
_REPEATABLE = frozenset({"GET", "PUT", "DELETE"})
# What may be in the first line of a call as it is: no blank, no end of the line.
_PLAIN = re.compile(r"[!-~]+")
_SAFE = "".join(map(chr, range(ord("!"), ord("~") + 1)))


class CallFailed(Exception):  # noqa: N818 - an event, not a mistake
    """A call without a usable answer. The message says why; `is_temporary` whether to try again at once.

    `status` is that of an answer that leads elsewhere.
    """

    def __init__(self, reason: str, *, is_temporary: bool = True, status: int | None = None) -> None:
        super().__init__(reason)
        self.is_temporary = is_temporary
        self.status = status


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer with its JSON. `sent_at` is on the clock of the leases; `date` is the server's wall clock."""

    status: int
    data: Any
    sent_at: float
    took_s: float
    date: str | None = None
    body: bytes = b""
    # See `uid_of_server`, for this connection.
    server_uid: Callable[[], int | None] = lambda: None

    @property
    def detail(self) -> str:
        """What the server says about an error."""
        text = self.data.get("detail") if isinstance(self.data, dict) else None
        return plain(text) if isinstance(text, str) and text else f"it answered with status {self.status}"


class _NotConnected(CallFailed):
    """Nothing was sent."""


class Transport:
    """Calls servers over HTTP, in the event loop that opened it.

    `uses_sockets`: a server on this machine is called by its Unix socket, if it has one that can be trusted. `is_named`:
    the user named the endpoints, so a socket that the user named too is used only for the server it belongs to.
    """

    def __init__(
        self,
        *,
        ca_file: str | None = None,
        max_bytes: int = MAX_BYTES,
        uses_sockets: bool = True,
        is_named: bool = True,
    ) -> None:
        self._ca_file = ca_file
        self._tls: ssl.SSLContext | None = None
        self._sockets = LocalSockets(self._ask, is_named=is_named) if uses_sockets else None
        self._max_bytes = max_bytes
        self._is_open = False
        self._idle: dict[Where, list[ServerConnection]] = {}

    async def open(self) -> None:
        """Get ready to call; a ValueError if the CA file cannot be used."""
        if self._ca_file:
            try:
                self._tls = ssl.create_default_context(cafile=self._ca_file)
            except (OSError, ssl.SSLError) as error:
                raise ValueError(f"GPU_POOL_CA_FILE={self._ca_file!r} cannot be used: {error}") from error
        self._is_open = True

    async def close(self) -> None:
        if self._sockets is not None:
            await self._sockets.close()
        self._is_open = False
        idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()
        await asyncio.sleep(0)  # the loop closes them with its next turn

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def call(
        self,
        method: str,
        url: str,
        *,
        body: Mapping[str, Any] | bytes | None = None,
        token: str | None = None,
        timeout_s: float,
    ) -> Reply:
        """Make one call, whose `body` may be JSON already; CallFailed if there is no readable answer."""
        sockets, server = self._sockets, server_of(url)
        is_settled = sockets is None or server in sockets.settled
        path = None if sockets is None else sockets.settled[server] if is_settled else await sockets.choose(url)
        try:
            reply = await self._call(method, url, path, body, token, timeout_s=timeout_s)
        except _NotConnected:
            if path is None or sockets is None or server in sockets.settled:
                raise
            # The socket is that of a server that died, and nothing was sent. Any user may have the port now.
            await self._check_port(url, path)
            path = None
            reply = await self._call(method, url, path, body, token, timeout_s=timeout_s)
        if sockets is not None and not is_settled:
            sockets.answered(url, path)
        return reply

    async def _check_port(self, url: str, path: Path) -> None:
        """Raise CallFailed unless the port's server is of the user whose socket does not answer."""
        try:
            reply = await self._call("GET", url_of_pool(url), None, None, None, timeout_s=COMPARE_S, is_parsed=False)
        except CallFailed as failed:
            raise CallFailed(f"the socket {path} does not answer, and by its port: {failed}") from None
        if (refusal := judge_port(urlsplit(url).netloc, path, reply.server_uid)) is not None:
            raise CallFailed(refusal, is_temporary=False)

    async def _ask(self, url: str, path: Path | None) -> Any:
        try:
            return (await self._call("GET", url, path, None, None, timeout_s=COMPARE_S)).data
        except CallFailed:
            return None

    async def _call(
        self,
        method: str,
        url: str,
        path: Path | None,
        body: Mapping[str, Any] | bytes | None,
        token: str | None,
        *,
        timeout_s: float,
        is_parsed: bool = True,
    ) -> Reply:
        base = server_of(url)
        target = target_of(url, base)
        try:
            where, fields = address_of(base, path)
        except UnicodeError as error:
            raise CallFailed(f"its name cannot be looked up: {error}", is_temporary=False) from None
        if token:
            fields += f"Authorization: Bearer {token}\r\n"
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = encode(method, target, fields, content)
        sent_at = boot_time()
        try:
            async with asyncio.timeout(timeout_s):
                answer, connection = await self._exchange(where, request, can_repeat=method in _REPEATABLE)
        except TimeoutError:
            # The timeout was long enough: the caller must not try again at once.
            raise CallFailed(f"no answer within {timeout_s:g} s", is_temporary=False) from None
        except ConnectFailed as error:
            raise _NotConnected(f"cannot connect{'' if path is None else f' to the socket {path}'}: {error}") from None
        except (BadAnswer, OSError) as error:
            raise CallFailed(str(error) or type(error).__name__) from None
        status = answer.status
        if 300 <= status < 400:
            why = f"it redirects (status {status}), which is not followed; give the address it leads to"
            raise CallFailed(why, is_temporary=False, status=status)
        took_s = boot_time() - sent_at
        data = _parse(answer.body, status) if is_parsed else None
        return Reply(status, data, sent_at, took_s, answer.fields.get("date"), answer.body, connection.server_uid)

    async def _exchange(
        self, where: Where, request: bytes, *, can_repeat: bool
    ) -> tuple[AnswerReader, ServerConnection]:
        """Send a call and read its answer."""
        while self._is_open:
            reused = self._take_idle(where)
            connection = reused or await self._connect(where)
            answer = AnswerReader(self._max_bytes)
            try:
                await self._talk(connection, request, answer)
            except (BadAnswer, OSError) as error:
                # The server may have closed a connection that was idle.
                is_stale = reused is not None and not answer.has_begun and can_repeat
                if isinstance(error, TimeoutError) or not is_stale:
                    raise
            else:
                self._put_back(where, connection, can_stay=answer.is_reusable)
                return answer, connection
        raise BadAnswer("the client is stopped")

    async def _talk(self, connection: ServerConnection, request: bytes, answer: AnswerReader) -> None:
        try:
            connection.send(request)
            while data := await connection.receive():
                if answer.feed(data):
                    break
            else:
                answer.end()
        except BaseException:
            connection.close()
            raise

    async def _connect(self, where: Where) -> ServerConnection:
        if where.is_tls and self._tls is None:
            self._tls = ssl.create_default_context()
        return await connect(where, self._tls if where.is_tls else None)

    def _take_idle(self, where: Where) -> ServerConnection | None:
        connections = self._idle.get(where)
        while connections:
            connection = connections.pop()
            if connection.is_idle() and boot_time() - connection.idle_since < IDLE_S:
                return connection
            connection.close()
        return None

    def _put_back(self, where: Where, connection: ServerConnection, *, can_stay: bool) -> None:
        connections = self._idle.setdefault(where, [])
        if can_stay and self._is_open and len(connections) < MOST_IDLE:
            connection.idle_since = boot_time()
            connections.append(connection)
        else:
            connection.close()


def target_of(url: str, base: str) -> str:
    """What of a URL the first line of a call has."""
    target = url[len(base) :] or "/"
    return target if _PLAIN.fullmatch(target) is not None else quote(target, safe=_SAFE)


@lru_cache(maxsize=256)
def address_of(base: str, path: Path | None) -> tuple[Where, str]:
    """Where a server is, and the fields of every call to it."""
    parts = urlsplit(base)
    name = parts.hostname or ""
    if not name.isascii():
        name = name.encode("idna").decode("ascii")
    where = Where(name, parts.port or DEFAULT_PORTS[parts.scheme], path, is_tls=parts.scheme == "https")
    host = f"[{name}]" if ":" in name else name
    fields = {"Host": host if parts.port is None else f"{host}:{parts.port}", "User-Agent": "gpu-worker-pool"}
    # No compression: two compressed megabytes may be gigabytes.
    fields |= {"Accept": "*/*", "Accept-Encoding": "identity"}
    return where, "".join(f"{name}: {value}\r\n" for name, value in fields.items())


def _parse(text: bytes, status: int) -> Any:
    """The JSON of an answer; None for an error without JSON, CallFailed for any other answer without."""
    try:
        return _JSON.decode(text.decode())
    except (ValueError, RecursionError):
        if status >= 400:
            return None  # an error page of a proxy or a foreign server: the status is enough
        raise CallFailed("its answer is not JSON; is this a GPU statistics server?") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)
