"""A network between a candidate and its database that can go silent: nothing arrives, and no connection breaks.

What is sent meanwhile waits, as in the buffers of TCP, and arrives when the network is back: an append or a claim may be
carried out long after its sender gave it up. What has a whole second to be sent again is not lost in a real network either.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter


class SilentProxy:
    """Runs in a thread. `stop_requests` and `stop_answers` are the two ways of a partition; `restore` ends both."""

    def __init__(self, database_port: int) -> None:
        self.database_port = database_port
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._requests = asyncio.Event()
        self._answers = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        # How many bytes came from the candidate while requests were stopped.
        self.held_back = 0
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def stop_requests(self) -> None:
        self.held_back = 0
        self._loop.call_soon_threadsafe(self._requests.clear)

    def stop_answers(self) -> None:
        self._loop.call_soon_threadsafe(self._answers.clear)

    def cut(self) -> None:
        self.stop_requests()
        self.stop_answers()

    def restore(self) -> None:
        self._loop.call_soon_threadsafe(self._requests.set)
        self._loop.call_soon_threadsafe(self._answers.set)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._requests.set()
        self._answers.set()

    async def _stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: Reader, writer: Writer) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: Reader, writer: Writer) -> None:
        to_database: Writer | None = None
        try:
            await self._requests.wait()
            from_database, to_database = await asyncio.open_connection("127.0.0.1", self.database_port)
            ways = (self._pass_requests(reader, to_database), self._pass_answers(from_database, writer))
            pumps = [asyncio.ensure_future(way) for way in ways]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            pass  # the database is away, so the candidate is let go
        finally:
            for end in filter(None, (writer, to_database)):
                # In good order: what was sent before the end arrives.
                end.close()
                with suppress(OSError):
                    await end.wait_closed()

    async def _pass_requests(self, reader: Reader, writer: Writer) -> None:
        while chunk := await reader.read(65536):
            if not self._requests.is_set():
                self.held_back += len(chunk)
                await self._requests.wait()
            writer.write(chunk)
            await writer.drain()

    async def _pass_answers(self, reader: Reader, writer: Writer) -> None:
        while chunk := await reader.read(65536):
            await self._answers.wait()
            writer.write(chunk)
            await writer.drain()
