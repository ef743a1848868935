"""Where the host names of the documents lead. Read by the tests, and by every Python that a shell block starts."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any

VARIABLE = "DOCUMENTS_NETWORK"
PORT = 8000
LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_HOST = re.compile(rf"(?<![\w.-])([A-Za-z0-9][A-Za-z0-9.-]*):{PORT}\b")


def hosts_in(text: str) -> set[str]:
    """The hosts that a text calls."""
    return set(_HOST.findall(text))


def port_for(host: str, ports: Mapping[str, int]) -> int:
    """This machine is one server, names that end in an even number are another, all others a third; what begins with "old"
    has statistics only.
    """
    if host in LOCAL:
        return ports["here"]
    if host.startswith("old"):
        return ports["old"]
    return ports["even" if host[-1:] in set("02468") else "odd"]


def looking_up(ports: Mapping[str, int]) -> Callable[..., Any]:
    """As socket.getaddrinfo, but that the documents' port leads to a server of the tests."""
    real = socket.getaddrinfo

    def look_up(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if port == PORT:
            return real("127.0.0.1", port_for(str(host), ports), *args, **options)
        return real(host, port, *args, **options)

    return look_up


def lead() -> None:
    """For a process of its own: as its environment says."""
    if VARIABLE in os.environ:
        socket.getaddrinfo = looking_up(json.loads(os.environ[VARIABLE]))
