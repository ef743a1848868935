"""Looks up the names of servers."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from threading import Thread

from aiohttp.abc import AbstractResolver, ResolveResult


class PatientResolver(AbstractResolver):
    """Looks names up in daemon threads.

    A name server that hangs would otherwise block the threads of other work, and keep the program from stopping. The
    connector looks up each name once at a time, so there are never more threads than names.
    """

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[list[ResolveResult]] = loop.create_future()

        def look_up() -> None:
            try:
                answers = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:
                outcome: list[ResolveResult] | OSError = error if isinstance(error, OSError) else OSError(str(error))
            else:
                outcome = [
                    ResolveResult(
                        hostname=host,
                        host=str(address[0]),
                        port=int(address[1]),
                        family=kind,
                        proto=protocol,
                        flags=socket.AI_NUMERICHOST,
                    )
                    for kind, _, protocol, _, address in answers
                ]
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(tell, outcome)

        def tell(outcome: list[ResolveResult] | OSError) -> None:
            if found.done():
                return
            if isinstance(outcome, OSError):
                found.set_exception(outcome)
            else:
                found.set_result(outcome)

        Thread(target=look_up, name="server-names", daemon=True).start()
        return await found

    async def close(self) -> None:
        pass
