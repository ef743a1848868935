"""The addresses of a server on this machine."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import ip_address
from typing import Any


@lru_cache(maxsize=256)
def is_this_machine(host: str) -> bool:
    """Whether a name or address is loopback."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def is_own_address(host: str) -> bool:
    """Whether a name or address leads to this machine: then a socket can be bound to it here."""
    if is_this_machine(host):
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address[0], 0))
    except OSError:
        return False
    return True


def is_every_address(host: str) -> bool:
    """Whether it stands for all addresses of the machine."""
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


def urls(host: str, port: int, prefix: str, *, names: Sequence[str]) -> list[str]:
    """The URLs of a server that listens there, nearest first. A server on all addresses has all `names`."""
    hosts = ["localhost", *names] if is_every_address(host) else ["localhost" if host == "127.0.0.1" else host]
    return [f"http://{f'[{name}]' if ':' in name else name}:{port}{prefix}" for name in dict.fromkeys(hosts)]


def names_of_this_machine(*, with_ipv6: bool) -> list[str]:
    """The host name, and the addresses from which this machine reaches others. No name server is asked."""
    name = socket.gethostname()
    # A machine without a name of its own is called so, and each other machine means itself by that.
    names = () if name.partition(".")[0] == "localhost" else (name,)
    families = [(socket.AF_INET, "192.0.2.1"), *([(socket.AF_INET6, "2001:db8::1")] if with_ipv6 else [])]
    found = (_own_address(family, elsewhere) for family, elsewhere in families)
    return [*names, *(address for address in found if address is not None)]


def _own_address(family: socket.AddressFamily, elsewhere: str) -> str | None:
    """The address that this machine would send from. To connect a datagram socket sends nothing."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asker:
            asker.connect((elsewhere, 9))
            return str(asker.getsockname()[0])
    except OSError:
        return None  # no network
