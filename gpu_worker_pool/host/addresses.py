"""The addresses of a server on this machine."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any

_GET_ADDRESS = 0x8915  # SIOCGIFADDR, of Linux
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


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
    """The host name, and the addresses on all networks except loopback. No name server is asked."""
    name = socket.gethostname()
    # A machine without a name of its own is called so, and each other machine means itself by that.
    names = () if name.partition(".")[0] == "localhost" else (name,)
    return [*names, *_ipv4_addresses(), *(_ipv6_addresses() if with_ipv6 else ())]


def _ipv4_addresses() -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asker.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # no IPv4 address
            found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not is_this_machine(address)]


def _ipv6_addresses() -> list[str]:
    try:
        lines = _IPV6_ADDRESSES.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    found = [IPv6Address(int(line.split()[0], 16)) for line in lines if line.strip()]
    # A link-local address needs the name of its link, which our URLs do not take.
    return [str(address) for address in found if not address.is_loopback and not address.is_link_local]
