"""Connections to this process: which user is at the other end, and how many there may be."""

from __future__ import annotations

import resource
import socket
import struct
import sys
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

Address = tuple[str, int]

_PROC_NET = Path("/proc/net")
_UID_MAP = Path("/proc/self/uid_map")
_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")
_EVERY_UID = ["0", "0", "4294967295"]

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


class UserNotKnown(Exception):  # noqa: N818 - a fact, not a mistake
    """The kernel does not say which user is at the other end. The message says why."""


def can_tell_users() -> bool:
    """Whether this platform can say which user has a connection."""
    return sys.platform == "linux"


def uid_of_unix_peer(connected: socket.socket) -> int:
    """The user who connected to this Unix socket; UserNotKnown where that is hidden."""
    try:
        _, uid, _ = struct.unpack("=iII", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    except (OSError, struct.error) as error:
        raise UserNotKnown(f"the kernel does not name the user of this connection ({error})") from None
    return _checked(uid)


def uid_of_tcp_peer(peer: Address, own: Address, connected: socket.socket | None = None) -> int:
    """The user whose socket is the other end of this TCP connection; UserNotKnown where it is closed or hidden.

    `peer` and `own` are the addresses as our end has them. With `connected`, our end, a new connection from the same
    port cannot be taken for the one that was asked about.
    """
    try:
        theirs, ours = _plain(peer), _plain(own)
        uid = _uid_by_netlink(theirs, ours)
        # A kernel that can be asked, and knows our end only, has answered: the other end is closed. All connections of
        # the machine are many, and are not read for every caller that hung up.
        if uid is None and _is_open(connected) and _uid_by_netlink(ours, theirs) is None:
            uid = _uid_by_proc(theirs, ours)
    except (OSError, ValueError, struct.error) as error:
        raise UserNotKnown(f"the kernel does not name the user of this connection ({error})") from None
    if uid is None or not _is_open(connected):
        raise UserNotKnown("the connection was closed before its user was looked up, or its user is hidden")
    return _checked(uid)


def quick_uid_of_tcp_peer(peer: Address, own: Address, connected: socket.socket | None = None) -> int | None:
    """The same where the kernel can be asked for this one connection; None where `uid_of_tcp_peer` must look."""
    try:
        uid = _uid_by_netlink(_plain(peer), _plain(own))
    except (OSError, ValueError, struct.error):
        return None
    return None if uid is None or not _is_open(connected) else _checked(uid)


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
    if peer[0] != own[0] and not _plain(peer)[0].is_loopback:
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


Plain = tuple[IPv4Address | IPv6Address, int]


def _plain(address: Address) -> Plain:
    """The address without a scope, and as IPv4 where it is mapped into IPv6."""
    found = ip_address(address[0].partition("%")[0])
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return found, address[1]


def _uid_by_netlink(local: Plain, remote: Plain) -> int | None:
    """Ask for this one socket, so that other connections cost nothing; None where the kernel does not know it."""
    family = socket.AF_INET6 if local[0].version == 6 else socket.AF_INET
    socket_id = _SOCKET_ID.pack(local[1], remote[1], local[0].packed, remote[0].packed) + _NO_INTERFACE_NO_COOKIE
    body = _REQUEST_BODY.pack(family, socket.IPPROTO_TCP, 0, _ANY_STATE) + socket_id
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as asker:
            # The kernel answers while it takes the request, so the answer is there or never comes.
            asker.settimeout(0)
            asker.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST, 1, 0) + body)
            answer = asker.recv(8192)
    except OSError:
        return None  # forbidden here, or a kernel without it
    _, kind, _, _, _ = _HEADER.unpack_from(answer)
    if kind != _BY_FAMILY:
        return None
    return _uid_in_answer(answer[_HEADER.size :], local, remote)


def _uid_in_answer(body: bytes, local: Plain, remote: Plain) -> int | None:
    family, state = _ANSWER_BODY.unpack_from(body)
    own_port, other_port, own, other = _SOCKET_ID.unpack_from(body, _ANSWER_BODY.size)
    *_, uid, inode = _ANSWER_END.unpack_from(body, _ANSWER_BODY.size + _SOCKET_ID.size + len(_NO_INTERFACE_NO_COOKIE))
    found = (_unpacked(own, family), own_port), (_unpacked(other, family), other_port)
    # Where there is no such connection, the kernel answers with a listening socket.
    if state == _LISTENS or found != (local, remote):
        return None
    return _uid_unless_closed(uid, inode)


def _uid_unless_closed(uid: int, inode: int) -> int | None:
    """The uid. A socket that its program has closed has no inode, and older kernels say that root has it."""
    return None if uid == 0 and inode == 0 else uid


def _unpacked(packed: bytes, family: int) -> IPv4Address | IPv6Address:
    if family == socket.AF_INET:
        return IPv4Address(packed[:4])
    return _plain((str(IPv6Address(packed)), 0))[0]


def _uid_by_proc(local: Plain, remote: Plain) -> int | None:
    """The same, by reading the table of all connections."""
    for name in ("tcp", "tcp6") if local[0].version == 4 else ("tcp6",):
        try:
            lines = (_PROC_NET / name).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if len(fields) > 9 and int(fields[3], 16) != _LISTENS:
                # The ports are compared first: most lines are other connections.
                ends = [end.rpartition(":") for end in fields[1:3]]
                if [int(port, 16) for *_, port in ends] == [local[1], remote[1]]:
                    found = [_address_in_proc(address) for address, *_ in ends]
                    if found == [local[0], remote[0]]:
                        return _uid_unless_closed(int(fields[7]), int(fields[9]))
    return None


def _address_in_proc(text: str) -> IPv4Address | IPv6Address:
    """An address of /proc/net: words of four bytes in the order of this machine."""
    words = [int(text[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(text), 8)]
    return _plain((str(ip_address(b"".join(words))), 0))[0]


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
