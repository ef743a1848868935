"""The Unix sockets of servers on this machine, which a client prefers to their ports.

Any user can answer on a free port. The socket is in a directory to which only the user of the server may write.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from gpu_worker_pool.host.addresses import is_this_machine
from gpu_worker_pool.host.connections import UserNotKnown
from gpu_worker_pool.host.unix_socket import VARIABLE, find_socket, is_configured, is_dead
from gpu_worker_pool.host.users import user_name

logger = logging.getLogger(__name__)

# What follows the prefix of a server in the path of a call.
_CALL = re.compile(r"/(leases|pool|gpu|usage|timeline|admin|events|health|config|ui|quotas|bookings)\b.*")
# The comparison runs beside the work; a command that ends sooner waits this long for it.
_PATIENCE_S = 0.3
# Asks for a URL by the socket, or, with None, by the port; None where there is no answer.
Ask = Callable[[str, Path | None], Awaitable[Any]]
_compared: set[str] = set()
_told_dead: set[str] = set()
_ROOT = 0


class LocalSockets:
    """Decides for each server on this machine: its socket or its port. The first answer settles it for this client.

    `ask` calls a server. `is_named`: the user named the endpoints.
    """

    def __init__(self, ask: Ask, *, is_named: bool) -> None:
        self._ask = ask
        self._is_named = is_named
        # As it was when the client was made: a program may have clients of several environments.
        self._environ = dict(os.environ)
        # What was decided, by server. A server's port is not taken for its socket when the server is away.
        self.settled: dict[str, Path | None] = {}
        self._comparisons: set[asyncio.Task[None]] = set()
        self._deciding = asyncio.Lock()

    async def choose(self, url: str) -> Path | None:
        """The socket for this call; None for the port."""
        server = server_of(url)
        if server in self.settled:
            return self.settled[server]
        parts = urlsplit(url)
        if not is_local(server):
            return None
        path = find_socket(self._environ, port=parts.port or 80)
        if path is None or not (self._is_named and is_configured(self._environ)) or is_dead(path):
            return path  # for a socket that is dead, the caller decides about the port
        async with self._deciding:
            if server not in self.settled:
                await self._decide(parts, path)
        return self.settled.get(server)

    async def _decide(self, parts: SplitResult, path: Path) -> None:
        """Use a socket that the user named only for its own server: the endpoint, which they named too, may be another."""
        by_socket, by_port = await self._pools(parts, path)
        if by_port is None:
            return  # it may be one server or two: to be seen when it answers
        known = _server_id(by_socket)
        if known is not None and known == _server_id(by_port):
            self.settled[server_of(parts.geturl())] = path
        elif known is not None and parts.netloc not in _compared:
            logger.warning(
                "%s=%s is the socket of another server than that of %s, which was named and is used; "
                "unset %s, or name the endpoint of its server",
                VARIABLE,
                path,
                parts.netloc,
                VARIABLE,
            )
        _compared.add(parts.netloc)

    def answered(self, url: str, path: Path | None) -> None:
        """Note where a call was answered; the first time by a socket, compare it with the port."""
        server = server_of(url)
        if server in self.settled:
            return
        self.settled[server] = path
        parts = urlsplit(url)
        if path is not None and parts.netloc not in _compared:
            _compared.add(parts.netloc)
            task = asyncio.create_task(self._compare(parts, path))
            self._comparisons.add(task)
            task.add_done_callback(self._comparisons.discard)

    async def close(self) -> None:
        if self._comparisons:
            _, late = await asyncio.wait(self._comparisons, timeout=_PATIENCE_S)
            for task in late:
                task.cancel()

    async def _compare(self, parts: SplitResult, path: Path) -> None:
        by_socket, by_port = await self._pools(parts, path)
        if by_socket is None or by_port is None:
            return  # one of them does not answer
        known = _server_id(by_socket)
        if known is not None and _server_id(by_port) != known:
            logger.warning(
                "%s and %s are different servers; the socket is used, because only the user of its server can have put "
                "it there. Another program has the port: `gpu-pool doctor` looks closer",
                path,
                parts.netloc,
            )

    async def _pools(self, parts: SplitResult, path: Path) -> tuple[Any, Any]:
        """The pools that the socket and the port show; None where there is no answer."""
        pool = url_of_pool(parts.geturl())
        return await asyncio.gather(self._ask(pool, path), self._ask(pool, None))


def server_of(url: str) -> str:
    """The scheme and the server of a URL."""
    end = url.find("/", url.index("://") + 3)
    return url if end < 0 else url[:end]


@lru_cache(maxsize=256)
def is_local(server: str) -> bool:
    """Whether a server is on this machine, and is called without TLS."""
    parts = urlsplit(server)
    return parts.scheme == "http" and is_this_machine(parts.hostname or "")


def url_of_pool(url: str) -> str:
    """The URL of the pool of the server that this call is for."""
    parts = urlsplit(url)
    return f"http://{parts.netloc}{_CALL.sub('', parts.path)}/pool?queue=0&leases=0"


def judge_port(netloc: str, path: Path, find_uid: Callable[[], int | None]) -> str | None:
    """Why the server at the port must not be used instead of the socket, which does not answer; None if it may be.

    It may be if its user is root, or the one to whom the directory of the socket belongs.
    """
    dead = f"the socket {path} does not answer"
    try:
        uid, owner = find_uid(), path.parent.stat().st_uid
    except (UserNotKnown, OSError) as error:
        whose = f"the user of the server at {netloc} is not known ({error})"
    else:
        if uid is None or uid in {_ROOT, owner}:
            if netloc not in _told_dead:
                _told_dead.add(netloc)
                logger.warning("%s; the port %s is used instead", dead, netloc)
            return None
        whose = f"the server at {netloc} is of user {user_name(uid)}, not of {user_name(owner)}"
    return (
        f"{dead}, and {whose}, so it is not used; restart the server of that socket, or set {VARIABLE}= (empty) to use the "
        "port all the same"
    )


def _server_id(pool: Any) -> str | None:
    found = pool.get("server_id") if isinstance(pool, dict) else None
    return found if isinstance(found, str) else None
