"""Looks up the names of servers."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import Future
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
        found: Future[list[ResolveResult]] = Future()
        found.set_running_or_notify_cancel()  # a caller that leaves does not keep the thread from its outcome

        def look_up() -> None:
            try:
                answers = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:
                found.set_exception(error if isinstance(error, OSError) else OSError(str(error)))
                return
            found.set_result(
                [
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
            )

        Thread(target=look_up, name="server-names", daemon=True).start()
        return await asyncio.wrap_future(found)

    async def close(self) -> None:
        pass
