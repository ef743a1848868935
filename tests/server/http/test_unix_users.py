"""A caller on the server's machine is the Unix user it runs as. The facts are given; the kernel is asked elsewhere."""

from __future__ import annotations

import pytest

from gpu_worker_pool.core.model.configured import Role
from gpu_worker_pool.host.connections import UserNotKnown
from gpu_worker_pool.host.users import User
from gpu_worker_pool.server.http.access import (
    AccessRules,
    Caller,
    Denied,
    Origin,
    identify,
)
from gpu_worker_pool.server.http.tokens import Tokens

HERE = {"host": "localhost:8000"}
TOKENS = Tokens.parse("alice:alice-secret-token-1,admin:admin-secret-token-333")
SOCKET = "/run/gpu-worker-pool/8000.sock"


def by_tcp(user: User | None) -> Origin:
    return Origin("127.0.0.1", find_user=lambda: user)


def by_socket(user: User | None) -> Origin:
    return Origin(None, is_unix=True, find_user=lambda: user)


def unknown() -> User | None:
    raise UserNotKnown("the connection was closed")


def test_a_user_that_cannot_be_told_is_refused() -> None:
    with pytest.raises(Denied, match="cannot tell which user") as caught:
        identify(Origin("127.0.0.1", find_user=unknown), HERE, AccessRules(socket=SOCKET))
    assert caught.value.status == 401
    assert SOCKET in caught.value.detail


def test_the_user_is_not_looked_up_for_a_caller_from_elsewhere() -> None:
    def never() -> User | None:
        raise AssertionError("looked up")

    with pytest.raises(Denied):
        identify(Origin("10.0.0.9", find_user=never), HERE, AccessRules())
    with pytest.raises(Denied):
        identify(Origin("127.0.0.1", find_user=never), {**HERE, "via": "1.1 squid"}, AccessRules())


def test_by_the_socket_the_host_does_not_matter_and_a_proxy_does() -> None:
    assert identify(by_socket(User("alice")), {}, AccessRules()).name == "alice"
    with pytest.raises(Denied, match="proxy"):
        identify(by_socket(User("alice")), {"x-forwarded-for": "10.0.0.9"}, AccessRules())


def test_a_platform_without_users_trusts_the_machine_as_before() -> None:
    assert identify(by_tcp(None), HERE, AccessRules()) == Caller(is_local=True, role=Role.ADMINISTRATOR)
    assert identify(by_tcp(None), HERE, AccessRules(TOKENS)) == Caller(is_local=True)
