"""Who may name a process of the server's machine as the holder of a lease: a lease of such a process has no TTL."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.host.clock import boot_id
from gpu_worker_pool.host.processes import pid_namespace
from gpu_worker_pool.testing import ServerProcess
from tests.other_user import ALICE
from tests.server.calls_as import ask_as
from tests.server.leasing import assert_problem, new_id, put, release_all

ROOT = Path(__file__).parents[4]
TOKENS = {"ada": "the-secret-token-of-ada", "admin": "the-secret-token-of-admin"}
SETTINGS = {"GPU_POOL_TOKENS": " ".join(f"{name}:{token}" for name, token in TOKENS.items())}
# All of this can be read by every user of the machine.
INIT: dict[str, Any] = {"pid": 1, "boot_id": boot_id(), "pid_namespace": pid_namespace()}

# In a network namespace of its own, which reaches no network: a server, and calls by an address that is not loopback.
OWN_ADDRESS = "192.0.2.7"
SET_UP = f'ip link set lo up && ip address add {OWN_ADDRESS}/32 dev lo || exit 77; exec "$@"'
PROGRAM = """
import http.client, json, sys
from gpu_worker_pool.testing import Answer, ServerProcess
address, settings, calls = json.loads(sys.argv[1])
answers = []
with ServerProcess({"HOST": address, **settings}) as server:
    for method, path, token, body in calls:
        connection = http.client.HTTPConnection(address, server.port, timeout=30)
        connection.request(method, path, json.dumps(body), {"Authorization": f"Bearer {token}"})
        answer = Answer.read(connection)
        answers.append([answer.status, answer.json])
        connection.close()
print(json.dumps(answers))
"""


def call_by_own_address(*calls: tuple[str, str, str, Any]) -> list[Any]:
    """The status and the body of these calls (method, path, token, body), made by the address of the box in its network."""
    unshare = shutil.which("unshare")
    if unshare is None or shutil.which("ip") is None:
        pytest.skip("there is no unshare or no ip here")
    order = json.dumps([OWN_ADDRESS, SETTINGS, calls])
    command = [unshare, "-n", "/bin/sh", "-c", SET_UP, "sh", sys.executable, "-c", PROGRAM, order]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode == 77 or done.stderr.startswith("unshare"):
        pytest.skip(f"no network namespace can be had here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    answers: list[Any] = json.loads(done.stdout)
    return answers


@pytest.fixture(scope="module")
def running() -> Iterator[ServerProcess]:
    with ServerProcess(SETTINGS) as server:
        yield server


@pytest.fixture
def server(running: ServerProcess) -> Iterator[ServerProcess]:
    yield running
    release_all(running)


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKENS[name]}"}


def test_a_caller_by_the_network_names_no_process_here_and_has_a_ttl() -> None:
    (ada, lease), (admin, another), (none, third), (_, outcome) = call_by_own_address(
        ("PUT", "/leases/ada", TOKENS["ada"], {"ttl_s": 5, **INIT}),
        ("PUT", "/leases/admin", TOKENS["admin"], {"ttl_s": 5, **INIT}),
        ("PUT", "/leases/none", TOKENS["ada"], {**INIT, "pid": 2**22 + 1}),
        ("POST", "/leases/renew", TOKENS["ada"], {"ids": ["ada"]}),
    )

    assert (ada, admin, none) == (201, 201, 201)
    assert [answer["is_local"] for answer in (lease, another, third)] == [False, False, False]
    assert 0 < lease["expires_in_s"] <= 5
    (renewed,) = outcome["renewed"]
    assert 0 < renewed["expires_in_s"] <= 5


def test_a_caller_behind_a_proxy_names_none_either(server: ServerProcess) -> None:
    lease = put(server, new_id(), headers={**bearer("ada"), "X-Forwarded-For": "10.0.0.7"}, **INIT).json

    assert (lease["is_local"], lease["expires_in_s"] is None) == (False, False)


def test_where_only_the_socket_is_local_a_caller_by_loopback_names_none() -> None:
    with ServerProcess({**SETTINGS, "GPU_POOL_LOCAL": "socket"}) as server:
        assert not put(server, new_id(), headers=bearer("ada"), **INIT).json["is_local"]


def test_a_user_of_this_machine_with_a_token_names_no_process_of_another_user(server: ServerProcess) -> None:
    (refused,) = ask_as(ALICE, server, [("PUT", f"/leases/{new_id()}", INIT)], headers=bearer("ada"))

    assert_problem(refused, 403, "pid 1 is a process of root", "Only an administrator")


def test_an_administrator_of_this_machine_names_any(server: ServerProcess) -> None:
    lease = put(server, new_id(), **INIT).json

    assert (lease["is_local"], lease["expires_in_s"]) == (True, None)
