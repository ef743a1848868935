"""A listening socket of a test, of which no connection is left over when it is closed.

asyncio's own server loses a connection that it is just taking in when it is closed: its socket stays open, and pytest blames
another test for that.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Self

START_S = 30.0
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Listener:
    """Calls `serve` for each connection, and closes the connection when that ends. `port` is known after the start; started
    again, it listens there again.
    """

    def __init__(self, serve: Serve, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self._serve, self.port, self._tls = serve, port, tls
        self._socket: socket.socket | None = None
        self._connections: dict[asyncio.Task[None], socket.socket] = {}

    def start(self) -> None:
        """Listen in the running event loop."""
        self._socket = socket.create_server(("127.0.0.1", self.port), backlog=512)
        self._socket.setblocking(False)
        self.port = self._socket.getsockname()[1]
        asyncio.get_running_loop().add_reader(self._socket, self._accept, self._socket)

    async def stop(self) -> None:
        """As if the process had died: connections are cut, and new ones are refused. Stopping twice is harmless."""
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._socket = None
        connections = dict(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        for connection in connections.values():
            connection.close()  # of those that were cancelled before they began

    def _accept(self, listening: socket.socket) -> None:
        with suppress(BlockingIOError, ConnectionError):  # the client is gone again
            connection, _ = listening.accept()
            connection.setblocking(False)
            task = asyncio.get_running_loop().create_task(self._take(connection))
            self._connections[task] = connection
            task.add_done_callback(self._connections.pop)

    async def _take(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):  # the client is gone
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._tls)
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            try:
                await self._serve(reader, writer)
            except asyncio.CancelledError:
                transport.abort()
                raise
            finally:
                writer.close()


class ListenerThread:
    """Listens in the event loop of a thread of its own, from entering to leaving."""

    def __init__(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)
        self._listener = Listener(self.serve, port, tls)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.result(START_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(START_S)

    @property
    def port(self) -> int:
        return self._listener.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._listen())
        except OSError as error:
            self._started.set_exception(error)
        else:
            self._started.set_result(None)
            self.loop.run_forever()
            self.loop.run_until_complete(self._listener.stop())
        finally:
            self.loop.close()

    async def _listen(self) -> None:
        self._listener.start()
