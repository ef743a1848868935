"""Connections to this process: which user is at the other end, and how many there may be."""

from __future__ import annotations

import resource
import socket
import struct
import sys
from pathlib import Path

Address = tuple[str, int]

_UID_MAP = Path("/proc/self/uid_map")
_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")
_EVERY_UID = ["0", "0", "4294967295"]
_CREDENTIALS = struct.Struct("=iII")

# Of linux/sock_diag.h and linux/inet_diag.h.
_SOCK_DIAG = 4
_BY_FAMILY = 20
_REQUEST = 1
_HEADER = struct.Struct("=IHHII")
_REQUEST_BODY = struct.Struct("=BBBxI")
_SOCKET_ID = struct.Struct(">HH16s16s")
_NO_INTERFACE_NO_COOKIE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
_ANSWER_BODY = struct.Struct("=BBxx")
_ANSWER_END = struct.Struct("=IIIII")
_ANY_STATE = 0xFFFFFFFF
_LISTENS = 10

# The states of our end in which the connection still exists: established, and closed for writing by the other end.
_OPEN_STATES = frozenset({1, 8})
_MAPPED = bytes(10) + b"\xff\xff"
_IPV6_LOOPBACK = bytes(15) + b"\x01"


class UserNotKnown(Exception):  # noqa: N818 - a fact, not a mistake
    """The kernel does not say which user is at the other end. The message says why."""


def can_tell_users() -> bool:
    """Whether this platform can say which user has a connection."""
    return sys.platform == "linux"


def unix_peer(connected: socket.socket) -> tuple[int, int]:
    """The process that made the other end of this Unix socket, and its user, whatever user that is; OSError."""
    pid, uid, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def uid_of_unix_peer(connected: socket.socket) -> int:
    """The user who connected to this Unix socket; UserNotKnown where that is hidden."""
    try:
        _, uid = unix_peer(connected)
    except (OSError, struct.error) as error:
        raise UserNotKnown(f"the kernel does not name the user of this connection ({error})") from None
    return _checked(uid)


def uid_of_tcp_peer(peer: Address, own: Address, connected: socket.socket | None = None) -> int:
    """The user whose socket is the other end of this TCP connection; UserNotKnown where it is closed or hidden.

    `peer` and `own` are the addresses as our end has them. With `connected`, our end, a new connection from the same
    port cannot be taken for the one that was asked about.
    """
    try:
        uid = _uid_by_netlink(_packed(peer[0]), peer[1], _packed(own[0]), own[1])
    except (OSError, ValueError, struct.error) as error:
        raise UserNotKnown(f"the kernel does not name the user of this connection ({error})") from None
    if uid is None or not _is_open(connected):
        raise UserNotKnown("the connection was closed before its user was looked up, or its user is hidden")
    return _checked(uid)


def uid_of_server(connected: socket.socket) -> int | None:
    """The user whose server is at the other end of this TCP connection, if that end is on this machine; None where it is
    not, where the platform cannot tell users, and for a Unix socket. UserNotKnown as above.
    """
    if not can_tell_users() or connected.family not in {socket.AF_INET, socket.AF_INET6}:
        return None
    try:
        peer, own = connected.getpeername()[:2], connected.getsockname()[:2]
    except OSError as error:
        raise UserNotKnown(f"the connection was closed before its user was looked up ({error})") from None
    if peer[0] != own[0] and not _is_loopback(_packed(peer[0])):
        return None
    return uid_of_tcp_peer(peer, own, connected)


def _is_open(connected: socket.socket | None) -> bool:
    try:
        return connected is None or connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _OPEN_STATES
    except OSError:
        return False


def _checked(uid: int) -> int:
    """The uid, unless it stands for all users of other user namespaces."""
    try:
        has_every_user = _UID_MAP.read_text(encoding="ascii").split() == _EVERY_UID
        if not has_every_user and uid == int(_OVERFLOW_UID.read_text(encoding="ascii")):
            raise UserNotKnown("the caller is in another user namespace, whose users have no name here")
    except (OSError, ValueError):
        pass
    return uid


def _packed(host: str) -> bytes:
    """The bytes of an address without its scope: 4 of IPv4, also where it is mapped into IPv6, and 16 of IPv6."""
    if ":" not in host:
        return socket.inet_pton(socket.AF_INET, host)
    return _unmapped(socket.inet_pton(socket.AF_INET6, host.partition("%")[0]))


def _unmapped(packed: bytes) -> bytes:
    return packed.removeprefix(_MAPPED)


def _is_loopback(packed: bytes) -> bool:
    return packed[0] == 127 if len(packed) == 4 else packed == _IPV6_LOOPBACK


def _uid_by_netlink(local: bytes, local_port: int, remote: bytes, remote_port: int) -> int | None:
    """Ask the kernel for this one socket, so that other connections cost nothing; None where it does not know it."""
    family = socket.AF_INET if len(local) == 4 else socket.AF_INET6
    socket_id = _SOCKET_ID.pack(local_port, remote_port, local, remote) + _NO_INTERFACE_NO_COOKIE
    body = _REQUEST_BODY.pack(family, socket.IPPROTO_TCP, 0, _ANY_STATE) + socket_id
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as asker:
        # The kernel answers while it takes the request, so the answer is there or never comes.
        asker.settimeout(0)
        asker.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST, 1, 0) + body)
        answer = asker.recv(8192)
    _, kind, _, _, _ = _HEADER.unpack_from(answer)
    if kind != _BY_FAMILY:
        return None
    family, state = _ANSWER_BODY.unpack_from(answer, at := _HEADER.size)
    *ports, own, other = _SOCKET_ID.unpack_from(answer, at := at + _ANSWER_BODY.size)
    *_, uid, inode = _ANSWER_END.unpack_from(answer, at + _SOCKET_ID.size + len(_NO_INTERFACE_NO_COOKIE))
    ends = [end[:4] if family == socket.AF_INET else _unmapped(end) for end in (own, other)]
    # Where there is no such connection, the kernel answers with a listening socket.
    if state == _LISTENS or [*ports, *ends] != [local_port, remote_port, local, remote]:
        return None
    # A socket that its program has closed has no inode, and older kernels say that root has it.
    return None if uid == inode == 0 else uid


ENOUGH = 65536
_MOST_KEPT_FREE = 1024


def raise_limit() -> int:
    """Raise the soft limit to the hard one, or to ENOUGH if that is less; return the soft limit in force.

    Not beyond ENOUGH: some programs that a server may start close every descriptor up to the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            # macOS refuses more than kern.maxfilesperproc; the server then works with what it has.
            return soft
        return wanted
    return soft


def is_scarce(descriptor: int) -> bool:
    """Whether this descriptor is among the last that may be opened; those are kept for connections.

    The system assigns the lowest free number, so a high one means that the lower ones are taken.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit != resource.RLIM_INFINITY and descriptor >= limit - min(limit // 4, _MOST_KEPT_FREE)
