"""The one way to call a server: bounded in time and size, no redirects, JSON only.

A server on this machine is called by its Unix socket: any user can answer on a free port, and the socket is in a directory to
which only the user of the server may write.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import ssl
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlsplit

from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.host.addresses import is_this_machine
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.host.unix_socket import VARIABLE, find_socket, is_configured
from gpu_worker_pool.urls import DEFAULT_PORTS
from gpu_worker_pool.wire.bounds import CLIENT_IDLE_S
from gpu_worker_pool.wire.reader import plain

from .answers import AnswerReader, BadAnswer, encode
from .connections import ConnectFailed, ServerConnection, Where, connect

logger = logging.getLogger(__name__)

MAX_BYTES = 16 * 1024 * 1024
COMPARE_S = 5.0
# Shows whose pool it is.
POOL_PATH = "/pool?queue=0&leases=0"
MOST_IDLE = 64
# May be made twice, so a connection that the server has just closed does no harm.
_REPEATABLE = frozenset({"GET", "PUT", "DELETE"})
# What may be in the first line of a call as it is: no blank, no end of the line.
_PLAIN = re.compile(r"[!-~]*")
T = TypeVar("T")
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
    """An answer with its JSON. `sent_at` is on the clock of the leases."""

    status: int
    data: Any
    sent_at: float
    took_s: float

    @property
    def detail(self) -> str:
        """What the server says about an error."""
        text = self.data.get("detail") if isinstance(self.data, dict) else None
        return plain(text) if isinstance(text, str) and text else f"it answered with status {self.status}"


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
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._ca_file = ca_file
        self._tls: ssl.SSLContext | None = None
        self._max_bytes = max_bytes
        self._uses_sockets, self._is_named = uses_sockets, is_named
        # As it was when the client was made: a program may have clients of several environments.
        self._environ = dict(os.environ if environ is None else environ)
        # The socket of each server that has answered; None: its port. The first answer settles it for this client, so that
        # a server's port is not taken for its socket when the server is away.
        self._settled: dict[str, Path | None] = {}
        self._deciding = asyncio.Lock()
        self._is_open = False
        # The one that was used last is at the end.
        self._idle: list[ServerConnection] = []

    @classmethod
    def of(cls, config: ClientConfig) -> Self:
        """The one of a client with these settings."""
        return cls(ca_file=config.ca_file, is_named=config.is_named, environ=config.environ)

    async def open(self) -> None:
        """Get ready to call; a ValueError if the CA file cannot be used."""
        if self._ca_file:
            try:
                self._tls = ssl.create_default_context(cafile=self._ca_file)
            except (OSError, ssl.SSLError) as error:
                raise ValueError(f"GPU_POOL_CA_FILE={self._ca_file!r} cannot be used: {error}") from error
        self._is_open = True

    async def close(self) -> None:
        self._is_open = False
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        await asyncio.sleep(0)  # the loop closes them with its next turn

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def call(
        self,
        method: str,
        base: str,
        path: str,
        *,
        body: Mapping[str, Any] | bytes | None = None,
        token: str | None = None,
        timeout_s: float,
    ) -> Reply:
        """Make one call to the server at `base`, whose `body` may be JSON already; CallFailed if there is no readable answer."""
        unix = self._settled[base] if base in self._settled else await self._choose_socket(base)
        target = path if _PLAIN.fullmatch(path) else quote(path, safe=_SAFE)
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        reply = await self._call(method, base, target, unix, content=content, token=token, timeout_s=timeout_s)
        self._settled.setdefault(base, unix)
        return reply

    async def _choose_socket(self, base: str) -> Path | None:
        """The socket for the first call to a server; None for its port.

        A server of this machine is called by its socket whatever it is called: under another name than localhost, and where
        the user named both, it must show the same pool by its socket and by its port.
        """
        parts = urlsplit(base)
        if not self._uses_sockets or parts.scheme != "http":
            return None
        unix, is_loopback = find_socket(self._environ, port=parts.port or 80), is_this_machine(parts.hostname or "")
        is_unclear = not is_loopback or (self._is_named and is_configured(self._environ))
        if unix is None or not is_unclear:
            return unix
        async with self._deciding:
            if base not in self._settled:
                by_socket, by_port = await asyncio.gather(self._pool(base, unix), self._pool(base, None))
                if by_socket is None and is_loopback:
                    return unix  # that says so: its server may have died, and any user may have the port now
                # Without an answer by the port it may be one server or two: to be seen when it answers.
                if by_port is not None and (own := _server_key(by_socket)) is not None and own == _server_key(by_port):
                    self._settled[base] = unix
                elif by_port is not None and is_loopback:
                    _warn_once(
                        f"{VARIABLE}={unix} is the socket of another server than that of {parts.netloc}, which was named "
                        f"and is used; unset {VARIABLE}, or name the endpoint of its server"
                    )
        return self._settled.get(base)

    async def _pool(self, base: str, unix: Path | None) -> Any:
        try:
            return (await self._call("GET", base, POOL_PATH, unix, timeout_s=COMPARE_S)).data
        except CallFailed:
            return None

    async def _call(
        self,
        method: str,
        base: str,
        target: str,
        unix: Path | None,
        *,
        content: bytes | None = None,
        token: str | None = None,
        timeout_s: float,
    ) -> Reply:
        try:
            where, prefix, fields = _address_of(base, unix)
        except UnicodeError as error:
            raise CallFailed(f"its name cannot be looked up: {error}", is_temporary=False) from None
        if token:
            fields += f"Authorization: Bearer {token}\r\n"
        request = encode(method, f"{prefix}{target}", fields, content)
        sent_at = boot_time()
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._exchange(where, request, can_repeat=method in _REPEATABLE)
        except TimeoutError:
            # The timeout was long enough: the caller must not try again at once.
            raise CallFailed(f"no answer within {timeout_s:g} s", is_temporary=False) from None
        except ConnectFailed as error:
            if unix is None:
                raise CallFailed(f"cannot connect: {error}") from None
            # Any user may have the port now.
            advice = f"restart its server, or set {VARIABLE}= (empty) to use the port all the same"
            raise CallFailed(f"cannot connect to the socket {unix}: {error}; {advice}") from None
        except (BadAnswer, OSError) as error:
            raise CallFailed(str(error) or type(error).__name__) from None
        if 300 <= answer.status < 400:
            why = f"it redirects (status {answer.status}), which is not followed; give the address it leads to"
            raise CallFailed(why, is_temporary=False, status=answer.status)
        took_s = boot_time() - sent_at
        return Reply(answer.status, _parse(answer.body, answer.status), sent_at, took_s)

    async def _exchange(self, where: Where, request: bytes, *, can_repeat: bool) -> AnswerReader:
        """Send a call and read its answer."""
        while self._is_open:
            reused = self._take_idle(where)
            connection = reused or await self._connect(where)
            answer = AnswerReader(self._max_bytes)
            try:
                await connection.exchange(request, answer)
            except (BadAnswer, OSError) as error:
                # The server may have closed a connection that was idle.
                is_stale = reused is not None and not answer.has_begun and can_repeat
                if isinstance(error, TimeoutError) or not is_stale:
                    raise
            else:
                self._put_back(connection, can_stay=answer.is_reusable)
                return answer
        raise BadAnswer("the client is stopped")

    async def _connect(self, where: Where) -> ServerConnection:
        if where.is_tls and self._tls is None:
            self._tls = ssl.create_default_context()
        return await connect(where, self._tls if where.is_tls else None)

    def _take_idle(self, where: Where) -> ServerConnection | None:
        for connection in reversed(self._idle):
            if connection.where == where:
                self._idle.remove(connection)
                if connection.is_open and boot_time() - connection.idle_since < CLIENT_IDLE_S:
                    return connection
                connection.close()
                return self._take_idle(where)
        return None

    def _put_back(self, connection: ServerConnection, *, can_stay: bool) -> None:
        if not (can_stay and connection.is_open and self._is_open):
            connection.close()
            return
        connection.idle_since = boot_time()
        self._idle.append(connection)
        if len(self._idle) > MOST_IDLE:
            self._idle.pop(0).close()


@lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def _server_key(pool: Any) -> str | None:
    """Which server shows this pool; the boxes of a fleet have one id."""
    if not isinstance(pool, dict) or not isinstance(pool.get("server_id"), str):
        return None
    return f"{pool['server_id']} {pool.get('node')}"


@lru_cache(maxsize=256)
def _address_of(base: str, unix: Path | None) -> tuple[Where, str, str]:
    """Where a server is, what goes before the path of each call, and the fields of every call to it."""
    parts = urlsplit(base)
    name = parts.hostname or ""
    if not name.isascii():
        name = name.encode("idna").decode("ascii")
    where = Where(name, parts.port or DEFAULT_PORTS[parts.scheme], unix, is_tls=parts.scheme == "https")
    host = f"[{name}]" if ":" in name else name
    fields = {"Host": host if parts.port is None else f"{host}:{parts.port}", "User-Agent": "gpu-worker-pool"}
    # No compression: two compressed megabytes may be gigabytes.
    fields |= {"Accept": "*/*", "Accept-Encoding": "identity"}
    prefix = parts.path if _PLAIN.fullmatch(parts.path) else quote(parts.path, safe=_SAFE)
    return where, prefix, "".join(f"{name}: {value}\r\n" for name, value in fields.items())


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


async def gather_with_grace(
    asked: Collection[asyncio.Task[T]], is_answer: Callable[[T], bool], grace_s: float
) -> set[asyncio.Task[T]]:
    """Wait for the calls to several servers, and return the late ones: one that is silent keeps no caller waiting. Once the
    result of one is an answer, the others have `grace_s` left, or as long as that one took.
    """
    clock = asyncio.get_running_loop().time
    began, waiting = clock(), set(asked)
    while waiting and not any(task.done() and is_answer(task.result()) for task in asked):
        _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if waiting:
        _, waiting = await asyncio.wait(waiting, timeout=max(grace_s, clock() - began))
    return waiting
