"""Whose a connection is, by the kernel: real sockets of every kind of address."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from gpu_worker_pool.core.model.configured import Role
from gpu_worker_pool.host.connections import UserNotKnown, uid_of_tcp_peer, uid_of_unix_peer
from gpu_worker_pool.host.users import User, Users, is_in_group, user_name
from tests.server.running import ROOT

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whose a connection is"),
    pytest.mark.allow_hosts(["127.0.0.1", "::1", "::ffff:127.0.0.1"]),
]

# Where the server listens, and by which address of which family a client comes.
ROADS = {
    "IPv4": (socket.AF_INET, "127.0.0.1", socket.AF_INET, "127.0.0.1"),
    "IPv6": (socket.AF_INET6, "::1", socket.AF_INET6, "::1"),
    "IPv4 to a server of both": (socket.AF_INET6, "::", socket.AF_INET, "127.0.0.1"),
    "a mapped address": (socket.AF_INET, "127.0.0.1", socket.AF_INET6, "::ffff:127.0.0.1"),
}


class Road:
    """Both ends of a connection."""

    def __init__(self, stack: ExitStack, kind: str) -> None:
        family, host, client_family, client_host = ROADS[kind]
        listener = stack.enter_context(socket.socket(family))
        if family == socket.AF_INET6 and host == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, 0))
        listener.listen()
        self.theirs = stack.enter_context(socket.socket(client_family))
        self.theirs.connect((client_host, listener.getsockname()[1]))
        self.ours = stack.enter_context(listener.accept()[0])
        self.peer, self.own = self.ours.getpeername()[:2], self.ours.getsockname()[:2]


@pytest.fixture(params=ROADS)
def road(request: pytest.FixtureRequest) -> Iterator[Road]:
    with ExitStack() as stack:
        try:
            yield Road(stack, request.param)
        except OSError as error:
            pytest.skip(f"this machine has no such connection: {error}")


def test_the_user_of_the_other_end_is_found(road: Road) -> None:
    assert uid_of_tcp_peer(road.peer, road.own, road.ours) == os.geteuid()


def test_a_closed_end_is_never_roots_and_a_listening_socket_is_no_end(road: Road) -> None:
    """Newer kernels remember the user of a closed end; root is never taken for it."""
    road.theirs.close()
    with suppress(UserNotKnown):
        assert uid_of_tcp_peer(road.peer, road.own, road.ours) == os.geteuid() != 0
    with pytest.raises(UserNotKnown, match="closed"):
        uid_of_tcp_peer(road.own, (road.peer[0], 1))


def test_the_user_of_a_unix_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert uid_of_unix_peer(ours) == os.geteuid()


def found(users: Users, uid: int) -> User:
    asyncio.run(users.know(uid, timeout_s=60.0))
    return users.find(uid)


def test_names_groups_and_administrators() -> None:
    nobody = 61_999
    assert user_name(0) == "root"
    assert user_name(nobody) == f"uid-{nobody}"
    assert is_in_group(0, "root")
    assert not is_in_group(0, "no-such-group")
    assert not is_in_group(nobody, "root")
    assert not is_in_group(0, None)
    users = Users("root")
    assert found(users, 0).role is Role.ADMINISTRATOR
    assert found(users, os.geteuid()).role is Role.ADMINISTRATOR
    assert found(users, nobody).role is Role.USER
    assert users.why_no_members() == []
    assert "GPU_POOL_ADMIN_GROUP='no-such-group'" in str(Users("no-such-group").why_no_members())
    assert "GPU_POOL_OPERATOR_GROUP='none'" in str(Users("root", "none").why_no_members())
    assert users.administrators().endswith("the members of the group root")


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes_and_the_last_quarter_is_scarce() -> None:
    program = (
        "import resource; from gpu_worker_pool.host.connections import is_scarce, raise_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300))\n"
        "print(raise_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE), is_scarce(10), is_scarce(299))"
    )
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)

    assert answer.stdout.split() == ["300", "300", "300", "False", "True"]
