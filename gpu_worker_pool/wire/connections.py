"""Connections to a server."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from asyncio.staggered import staggered_race
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Final, cast

from gpu_worker_pool.host.connections import uid_of_server

# How long the next address of a name waits for the one before it to be connected.
_NEXT_ADDRESS_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Where:
    """What to connect to: a Unix socket, else a port."""

    host: str
    port: int
    path: Path | None = None
    is_tls: bool = False


class ConnectFailed(Exception):  # noqa: N818 - an event, not a mistake
    """There is no connection, and nothing was sent. The message is the system's."""


class ServerConnection(asyncio.Protocol):
    """One connection of an event loop, for one call at a time. All that fails is an OSError."""

    def __init__(self) -> None:
        # When its last answer had come.
        self.idle_since = 0.0
        self._server_uid: tuple[int | None] | None = None
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._is_over = False
        self._error: Exception | None = None
        self._news: asyncio.Future[None] | None = None

    def server_uid(self) -> int | None:
        """See `uid_of_server`. The other end of a connection stays the same."""
        end = None if self._transport is None else self._transport.get_extra_info("socket")
        if self._server_uid is None and end is not None:
            self._server_uid = (uid_of_server(end),)
        return None if self._server_uid is None else self._server_uid[0]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # other loops have classes of their own

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._tell()

    def eof_received(self) -> None:
        self._is_over = True
        self._tell()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_over, self._error = True, error
        self._tell()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def is_idle(self) -> bool:
        """Whether nothing has come since the last answer, neither its end nor anything that was not asked for."""
        return not self._is_over and not self._received

    def send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    async def receive(self) -> bytes | memoryview:
        """What has come; nothing at its end."""
        while not self._received and not self._is_over:
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        if not self._received and self._error is not None:
            raise self._error if isinstance(self._error, OSError) else OSError(str(self._error))
        data, self._received = self._received, bytearray()
        return memoryview(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def connect(where: Where, tls: ssl.SSLContext | None) -> ServerConnection:
    """A connection of this loop; ConnectFailed, or an SSLError where the server cannot be trusted."""
    loop = asyncio.get_running_loop()
    try:
        if where.path is not None:
            return (await loop.create_unix_connection(ServerConnection, str(where.path)))[1]
        connected = await _first_connected(await _look_up(where.host, where.port))
        name = where.host if tls is not None else None
        try:
            return (await loop.create_connection(ServerConnection, sock=connected, ssl=tls, server_hostname=name))[1]
        except BaseException:
            connected.close()
            raise
    except (TimeoutError, ssl.SSLError):
        raise
    except OSError as error:
        raise ConnectFailed(in_words(error)) from None


def in_words(error: OSError) -> str:
    """The system's text. A failed name lookup has a number of its own, and only its text helps."""
    number = error.errno
    return os.strerror(number) if number is not None and number > 0 else error.strerror or str(error)


_Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]


async def _look_up(host: str, port: int) -> Sequence[_Address]:
    """The addresses of a name, looked up in a daemon thread: a name server that hangs would otherwise block the threads of other
    work, and keep the program from stopping.
    """
    with suppress(OSError, UnicodeError):
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    found: Future[Sequence[_Address]] = Future()
    found.set_running_or_notify_cancel()  # a caller that leaves does not keep the thread from its outcome

    def look_up() -> None:
        try:
            found.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            found.set_exception(error if isinstance(error, OSError) else OSError(str(error)))

    Thread(target=look_up, name="server-names", daemon=True).start()
    return await asyncio.wrap_future(found)


async def _first_connected(addresses: Sequence[_Address]) -> socket.socket:
    """A socket to the first address that connects. They are tried one after the other, the next one soon."""
    if len(addresses) == 1:
        return await _connected(addresses[0])
    ways = [partial(_connected, address) for address in addresses]
    found: socket.socket | None
    found, _, errors = await staggered_race(ways, _NEXT_ADDRESS_S)
    if found is None:
        raise next((error for error in errors if error is not None), OSError("it has no address"))
    return found


async def _connected(address: _Address) -> socket.socket:
    family, kind, protocol, _, place = address
    connecting = socket.socket(family, kind, protocol)
    try:
        connecting.settimeout(0)
        await asyncio.get_running_loop().sock_connect(connecting, place)
    except BaseException:
        connecting.close()
        raise
    return connecting
