"""The one way to call a server: bounded in time and size, no redirects, JSON only."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.host.connections import uid_of_server

from .local_sockets import LocalSockets, judge_port, url_of_pool
from .reader import plain

if TYPE_CHECKING:
    import aiohttp

MAX_BYTES = 16 * 1024 * 1024
COMPARE_S = 5.0
# A connection that was idle for so long is closed.
IDLE_S = 30.0


class CallFailed(Exception):  # noqa: N818 - an event, not a mistake
    """A call without a usable answer. The message says why; `is_temporary` whether to try again at once.

    `status` is that of an answer that leads elsewhere.
    """

    def __init__(self, reason: str, *, is_temporary: bool = True, status: int | None = None) -> None:
        super().__init__(reason)
        self.is_temporary = is_temporary
        self.status = status


class _NotConnected(CallFailed):
    """Nothing was sent."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer with its JSON. `sent_at` is on the clock of the leases; `date` is the server's wall clock."""

    status: int
    data: Any
    sent_at: float
    took_s: float
    date: str | None = None
    body: bytes = b""
    # Our end of the connection; None where it is not known.
    connected: socket.socket | None = None

    def server_uid(self) -> int | None:
        """The Unix user of the server, if it is on this machine and was called by its port; None where it is not, or
        where the platform cannot tell users. UserNotKnown if the kernel does not say.
        """
        return None if self.connected is None else uid_of_server(self.connected)

    @property
    def detail(self) -> str:
        """What the server says about an error."""
        text = self.data.get("detail") if isinstance(self.data, dict) else None
        return plain(text) if isinstance(text, str) and text else f"it answered with status {self.status}"


class Transport:
    """Calls servers over HTTP. `open` loads aiohttp, so that importing the client is cheap.

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
        self._sockets = LocalSockets(self._ask, is_named=is_named) if uses_sockets else None
        self._by_socket: dict[Path, aiohttp.ClientSession] = {}
        self._max_bytes = max_bytes
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Open the session; a ValueError if the CA file cannot be used."""
        import aiohttp  # noqa: PLC0415 - it loads more slowly than everything else together

        from .resolver import PatientResolver  # noqa: PLC0415 - it loads aiohttp, too

        tls: ssl.SSLContext | bool = True
        if self._ca_file:
            try:
                tls = ssl.create_default_context(cafile=self._ca_file)
            except (OSError, ssl.SSLError) as error:
                raise ValueError(f"GPU_POOL_CA_FILE={self._ca_file!r} cannot be used: {error}") from error
        self._session = _session(
            aiohttp.TCPConnector(limit=0, ssl=tls, keepalive_timeout=IDLE_S, resolver=PatientResolver())
        )

    async def close(self) -> None:
        if self._sockets is not None:
            await self._sockets.close()
        session, self._session = self._session, None
        for opened in (session, *self._by_socket.values()):
            if opened is not None:
                await opened.close()
        self._by_socket.clear()

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
        body: Mapping[str, Any] | None = None,
        token: str | None = None,
        timeout_s: float,
        is_parsed: bool = True,
    ) -> Reply:
        """Make one call; CallFailed if there is no readable answer. Without `is_parsed`, the answer has its body only."""
        sockets = self._sockets
        path = None if sockets is None else await sockets.choose(url)
        try:
            reply = await self._call(method, url, path, body, token, timeout_s=timeout_s, is_parsed=is_parsed)
        except _NotConnected:
            if path is None or sockets is None or sockets.is_settled(url):
                raise
            # The socket is that of a server that died, and nothing was sent. Any user may have the port now.
            await self._check_port(url, path)
            path = None
            reply = await self._call(method, url, path, body, token, timeout_s=timeout_s, is_parsed=is_parsed)
        if sockets is not None:
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
            return (await self._call("GET", url, path, None, None, timeout_s=COMPARE_S, is_parsed=True)).data
        except CallFailed:
            return None

    async def _call(
        self,
        method: str,
        url: str,
        path: Path | None,
        body: Mapping[str, Any] | None,
        token: str | None,
        *,
        timeout_s: float,
        is_parsed: bool,
    ) -> Reply:
        import aiohttp  # noqa: PLC0415 - loaded by now

        session = self._session_for(path)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        sent = None if body is None else json.dumps(body).encode()
        sent_at = boot_time()
        try:
            async with asyncio.timeout(timeout_s):
                async with session.request(method, url, data=sent, headers=headers, allow_redirects=False) as response:
                    text = await self._read(response)
        except TimeoutError:
            # The timeout was long enough: the caller must not try again at once.
            raise CallFailed(f"no answer within {timeout_s:g} s", is_temporary=False) from None
        except aiohttp.ClientSSLError as error:
            raise CallFailed(str(error)) from None
        except aiohttp.ClientConnectorError as error:
            where = "" if path is None else f" to the socket {path}"
            raise _NotConnected(f"cannot connect{where}: {_in_words(error.os_error)}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise CallFailed(str(error) or type(error).__name__) from None
        status = response.status
        if 300 <= status < 400:
            why = f"it redirects (status {status}), which is not followed; give the address it leads to"
            raise CallFailed(why, is_temporary=False, status=status)
        took_s = boot_time() - sent_at
        data = _parse(text, status) if is_parsed else None
        connected = getattr(response, "connected", None)
        return Reply(status, data, sent_at, took_s, response.headers.get("Date"), text, connected)

    def _session_for(self, path: Path | None) -> aiohttp.ClientSession:
        import aiohttp  # noqa: PLC0415 - loaded by now

        if self._session is None:
            raise CallFailed("the client is stopped")
        if path is None:
            return self._session
        if path not in self._by_socket:
            self._by_socket[path] = _session(aiohttp.UnixConnector(str(path), limit=0, keepalive_timeout=IDLE_S))
        return self._by_socket[path]

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        chunks: list[bytes] = []
        size = 0
        async for chunk in response.content.iter_any():
            size += len(chunk)
            if size > self._max_bytes:
                response.close()
                raise CallFailed(f"its answer is larger than {self._max_bytes // (1024 * 1024)} MiB")
            chunks.append(chunk)
        return b"".join(chunks)


def _session(connector: aiohttp.BaseConnector) -> aiohttp.ClientSession:
    import aiohttp  # noqa: PLC0415 - loaded by now

    class AnswerWithConnection(aiohttp.ClientResponse):
        """Keeps our end of the connection, which aiohttp forgets with the end of a short answer."""

        connected: socket.socket | None = None

        async def start(self, connection: Any) -> aiohttp.ClientResponse:
            if connection.transport is not None:
                self.connected = connection.transport.get_extra_info("socket")
            return await super().start(connection)

    # No cookies, no proxy of the environment, no compression: two compressed megabytes may be gigabytes.
    return aiohttp.ClientSession(
        connector=connector,
        headers={"User-Agent": "gpu-worker-pool", "Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        response_class=AnswerWithConnection,
    )


def _in_words(error: OSError) -> str:
    """The system's text. A failed name lookup has a number of its own, and only its text helps."""
    number = error.errno
    return os.strerror(number) if number is not None and number > 0 else error.strerror or str(error)


def _parse(text: bytes, status: int) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        if status >= 400:
            return None  # an error page of a proxy or a foreign server: the status is enough
        raise CallFailed("its answer is not JSON; is this a GPU statistics server?") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
