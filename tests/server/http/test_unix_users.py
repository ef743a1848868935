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
    may_manage,
    owner_for,
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


@pytest.mark.parametrize("origin", [by_tcp, by_socket])
@pytest.mark.parametrize("tokens", [Tokens(), TOKENS.broken()])
def test_the_name_and_the_rights_are_the_users(origin: object, tokens: Tokens) -> None:
    assert callable(origin)
    for user in (User("alice"), User("admin"), User("op", role=Role.OPERATOR), User("root", role=Role.ADMINISTRATOR)):
        found = identify(origin(user), HERE, AccessRules(tokens))
        assert found == Caller(user.name, is_local=True, role=user.role)


def test_a_token_counts_more_than_the_user() -> None:
    headers = {**HERE, "authorization": "Bearer alice-secret-token-1"}
    assert identify(Origin("127.0.0.1", find_user=unknown), headers, AccessRules(TOKENS)) == Caller("alice")


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


def test_local_callers_can_be_taken_by_the_socket_only() -> None:
    rules = AccessRules(TOKENS, takes_loopback=False, socket=SOCKET)
    assert identify(by_socket(User("alice")), HERE, rules).name == "alice"
    with pytest.raises(Denied, match=SOCKET) as caught:
        identify(by_tcp(User("root", role=Role.ADMINISTRATOR)), HERE, rules)
    assert caught.value.status == 401
    assert identify(by_tcp(None), {**HERE, "authorization": "Bearer admin-secret-token-333"}, rules).is_admin


def test_a_platform_without_users_trusts_the_machine_as_before() -> None:
    assert identify(by_tcp(None), HERE, AccessRules()) == Caller(is_local=True, role=Role.ADMINISTRATOR)
    assert identify(by_tcp(None), HERE, AccessRules(TOKENS)) == Caller(is_local=True)


ALICE, ROOT = Caller("alice", is_local=True), Caller("root", is_local=True, role=Role.ADMINISTRATOR)
EVERY_STATE = [Tokens(), TOKENS.broken()]


@pytest.mark.parametrize("tokens", EVERY_STATE)
def test_the_owner_of_a_new_lease_is_the_user(tokens: Tokens) -> None:
    assert owner_for(ALICE, None, tokens) == owner_for(ALICE, " alice ", tokens) == "alice"
    assert owner_for(ROOT, None, tokens) == "root"
    assert owner_for(ROOT, "bob", tokens) == "bob", "an administrator may request for another owner"
    with pytest.raises(Denied, match="here alice, not bob; leave owner out") as caught:
        owner_for(ALICE, "bob", tokens)
    assert caught.value.status == 403


@pytest.mark.parametrize("tokens", EVERY_STATE)
def test_a_user_may_change_own_leases_only(tokens: Tokens) -> None:
    assert may_manage(ALICE, "alice", tokens)
    assert may_manage(ALICE, None, tokens), "of a server that could not tell users"
    assert not may_manage(ALICE, "bob", tokens)
    assert not may_manage(Caller("admin", is_local=True), "bob", tokens)
    assert may_manage(ROOT, "bob", tokens)
