"""The server of this machine, by its Unix socket: what it hands out, to whom, and when that changes."""

from __future__ import annotations

import http.client
import json
import select
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from gpu_worker_pool.host.connections import unix_peer
from gpu_worker_pool.wire.leases import LeaseList
from gpu_worker_pool.wire.pool import PoolGpu, PoolView
from gpu_worker_pool.wire.reader import has_all, plain, read

_ANSWER_S: Final = 10.0
_MOST_BYTES: Final = 64 * 1024 * 1024
# Enough to notice each change at once, and to be called ten times a second at most.
_PACE_S: Final = 0.1
_BodyT = TypeVar("_BodyT", LeaseList, PoolView)


class ServerAway(Exception):  # noqa: N818 - an event
    """The server does not answer, or not with what it should. The message says why."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """The GPUs of this box, and the owners of each by its UUID. `server_uid` is the user of the server."""

    gpus: tuple[PoolGpu, ...]
    owners: tuple[tuple[str, str], ...]
    server_uid: int


class PoolServer:
    """Calls the server at this socket. `prefix` is before the path of each call."""

    def __init__(self, path: Path, prefix: str = "") -> None:
        self._path, self._prefix = path, prefix

    def ask(self) -> Holdings:
        """What holds now; ServerAway."""
        connection = _SocketConnection(self._path)
        try:
            leases = self._get(connection, "/leases", LeaseList, "leases")
            pool = self._get(connection, "/pool?queue=0&leases=0", PoolView, "gpus")
            server_uid = connection.peer_uid
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ServerAway(f"{self._path}: {error}") from None
        finally:
            connection.close()
        active = [lease for lease in leases.leases if lease.state == "active" and lease.owner is not None]
        owners = tuple((gpu.uuid, lease.owner or "") for lease in active for gpu in lease.gpus)
        return Holdings(pool.gpus, owners, server_uid)

    def _get(self, connection: _SocketConnection, path: str, kind: type[_BodyT], items: str) -> _BodyT:
        connection.request("GET", f"{self._prefix}{path}")
        answer = connection.getresponse()
        body = answer.read(_MOST_BYTES)
        data: Any = json.loads(body) if answer.status == http.HTTPStatus.OK else None
        found = read(kind, data, clean=plain)
        # A lease that cannot be read may be a holder's: without it, that holder would be shut out.
        if found is None or not has_all(found, data, items):
            raise ServerAway(f"{self._path} answers {path} with status {answer.status}, and not as a GPU server does")
        return found

    def changes(self, at_least_every_s: float) -> Iterator[None]:
        """Yield whenever something may have changed, and this often at least; ServerAway. Any byte of the stream of events says
        that something changed, so it is not read any further.
        """
        call = f"GET {self._prefix}/events?pace_s={_PACE_S} HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with socket.socket(socket.AF_UNIX) as stream:
            try:
                stream.settimeout(_ANSWER_S)
                stream.connect(str(self._path))
                stream.sendall(call.encode())
                if not stream.recv(65536).startswith(b"HTTP/1.1 200"):
                    raise ServerAway(f"{self._path} sends no events")
                while True:
                    yield
                    if select.select([stream], [], [], at_least_every_s)[0] and not stream.recv(65536):
                        raise ServerAway(f"{self._path} has ended")
            except OSError as error:
                raise ServerAway(f"{self._path}: {error}") from None


class _SocketConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_ANSWER_S)
        self.sock.connect(str(self._path))
        _, self.peer_uid = unix_peer(self.sock)
