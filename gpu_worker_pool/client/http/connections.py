"""Connections to a server, each for one call at a time."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Final, cast

from .answers import AnswerReader, BadAnswer

# How long the next address of a name waits for the one before it to be connected.
_NEXT_ADDRESS_S: Final = 0.5


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
    """A connection of an event loop. It is closed when something comes that was not asked for."""

    def __init__(self, where: Where) -> None:
        self.where = where
        self.is_open = True
        # When its last answer had come.
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._answer: AnswerReader | None = None
        self._answered: asyncio.Future[None] | None = None

    async def exchange(self, request: bytes, answer: AnswerReader) -> None:
        """Send a request and read its answer; BadAnswer or an OSError where there is none."""
        if self._transport is None or not self.is_open:
            raise BadAnswer("it closed the connection without an answer")
        self._answer, self._answered = answer, asyncio.get_running_loop().create_future()
        try:
            self._transport.write(request)
            await self._answered
        except BaseException:
            self.close()
            raise
        finally:
            self._answer = None

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # other loops have classes of their own

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            self.close()
            return
        try:
            if self._answer.feed(data):
                self._end()
        except BadAnswer as error:
            self._end(error)

    def eof_received(self) -> None:
        self.connection_lost(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        try:
            if self._answer is not None and error is None:
                self._answer.end()
        except BadAnswer as unfinished:
            error = unfinished
        self._end(error if error is None or isinstance(error, BadAnswer | OSError) else OSError(str(error)))

    def _end(self, error: Exception | None = None) -> None:
        """Take nothing more for the answer."""
        answered, self._answer, self._answered = self._answered, None, None
        if answered is None or answered.done():
            return
        if error is None:
            answered.set_result(None)
        else:
            answered.set_exception(error)


async def connect(where: Where, tls: ssl.SSLContext | None) -> ServerConnection:
    """A connection of this loop; ConnectFailed, or an SSLError where the server cannot be trusted."""
    loop, connection = asyncio.get_running_loop(), ServerConnection(where)
    try:
        if where.path is not None:
            await loop.create_unix_connection(lambda: connection, str(where.path))
            return connection
        addresses = await _look_up(where.host, where.port)
        name = where.host if tls is not None else None
        for number, address in enumerate(addresses, 1):
            # One after the other. The last one has all of the time.
            try:
                async with asyncio.timeout(_NEXT_ADDRESS_S if number < len(addresses) else None):
                    await loop.create_connection(lambda: connection, *address, ssl=tls, server_hostname=name)
            except ssl.SSLError:
                raise
            except OSError:  # a timeout as well
                if number == len(addresses):
                    raise
            else:
                return connection
        raise OSError("it has no address")  # noqa: TRY301 - as where it has one that refuses
    except (TimeoutError, ssl.SSLError):
        raise
    except OSError as error:
        # A failed name lookup has a number of its own, and only its text helps.
        number = error.errno or 0
        known = os.strerror(number) if number > 0 else error.strerror
        raise ConnectFailed(known or str(error)) from None


async def _look_up(host: str, port: int) -> list[tuple[str, int]]:
    """The addresses of a name, by a daemon thread: a name server that hangs would otherwise block the threads of other work,
    and keep the program from stopping.
    """
    found: Future[list[tuple[str, int]]] = Future()
    found.set_running_or_notify_cancel()  # a caller that leaves does not keep the thread from its outcome

    def look_up() -> None:
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found.set_result([(str(address[0]), int(address[1])) for *_, address in addresses])
        except (OSError, UnicodeError) as error:
            found.set_exception(error if isinstance(error, OSError) else OSError(str(error)))

    Thread(target=look_up, name="gpu-server-lookup", daemon=True).start()
    return await asyncio.wrap_future(found)
