"""A connection as the access rules see it: where it comes from, and whose it is."""

from __future__ import annotations

import asyncio
import socket
from functools import cached_property
from typing import Any, Self

from starlette.types import Scope

from gpu_worker_pool.host.connections import (
    Address,
    UserNotKnown,
    can_tell_users,
    uid_of_tcp_peer,
    uid_of_unix_peer,
)

# The key under which `BoundedProtocol` puts the connection into the scope of each call.
KEY = "gpu_pool.connection"


class Connection:
    """`peer` and `own` are the addresses of its ends; a Unix socket has none. `connected` is our end, where it is known."""

    def __init__(self, peer: Address | None, own: Address | None, connected: socket.socket | None = None) -> None:
        self._peer = peer
        self._own = own
        self._connected = connected

    @classmethod
    def of_transport(cls, transport: asyncio.Transport) -> Self:
        connected: socket.socket | None = transport.get_extra_info("socket")
        return cls(
            _address(transport.get_extra_info("peername")), _address(transport.get_extra_info("sockname")), connected
        )

    @classmethod
    def of_scope(cls, scope: Scope) -> Connection:
        """The connection of a call. Without our protocol, only its addresses are known."""
        known: Connection | None = scope.get(KEY)
        return known or cls(_address(scope.get("client")), _address(scope.get("server")))

    @property
    def host(self) -> str | None:
        return None if self._peer is None else self._peer[0]

    @cached_property
    def is_unix(self) -> bool:
        """Whether it came by the server's Unix socket: its family decides. A missing address proves nothing."""
        return self._connected is not None and self._connected.family == socket.AF_UNIX

    @cached_property
    def uid(self) -> int | None:
        """The user at the other end, on this machine; None where the platform cannot tell users. UserNotKnown if the
        kernel does not say. It is looked up once, and only if it is asked for.
        """
        if not can_tell_users():
            return None
        if self.is_unix and self._connected is not None:
            return uid_of_unix_peer(self._connected)
        if self._peer is None or self._own is None:
            raise UserNotKnown("the addresses of this connection are not known")
        return uid_of_tcp_peer(self._peer, self._own, self._connected)


def _address(found: Any) -> Address | None:
    if isinstance(found, tuple | list) and len(found) >= 2 and isinstance(found[1], int):
        return str(found[0]), found[1]
    return None
