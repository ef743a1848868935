"""The Unix sockets of servers on this machine, which a client prefers to their ports.

Any user can answer on a free port. The socket is in a directory to which only the user of the server may write.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpu_worker_pool.host.addresses import is_this_machine
from gpu_worker_pool.host.connections import UserNotKnown
from gpu_worker_pool.host.unix_socket import VARIABLE
from gpu_worker_pool.host.users import user_name

logger = logging.getLogger(__name__)

_ROOT = 0


def is_local(base: str) -> bool:
    """Whether a server is on this machine, and is called without TLS."""
    parts = urlsplit(base)
    return parts.scheme == "http" and is_this_machine(parts.hostname or "")


def is_same_server(by_socket: Any, by_port: Any) -> bool:
    """Whether the pools that the socket and the port show are of one server. The boxes of a fleet have one id."""
    known = _server_key(by_socket)
    return known is not None and known == _server_key(by_port)


def warn_of_other_server(base: str, path: Path) -> None:
    """Say that the user named a socket and an endpoint of two servers; the endpoint counts."""
    _warn_once(
        f"{VARIABLE}={path} is the socket of another server than that of {urlsplit(base).netloc}, which was named "
        f"and is used; unset {VARIABLE}, or name the endpoint of its server"
    )


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
            _warn_once(f"{dead}; the port {netloc} is used instead")
            return None
        whose = f"the server at {netloc} is of user {user_name(uid)}, not of {user_name(owner)}"
    return (
        f"{dead}, and {whose}, so it is not used; restart the server of that socket, or set {VARIABLE}= (empty) to use the "
        "port all the same"
    )


@lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def _server_key(pool: Any) -> str | None:
    if not isinstance(pool, dict) or not isinstance(pool.get("server_id"), str):
        return None
    return f"{pool['server_id']} {pool.get('node')}"
