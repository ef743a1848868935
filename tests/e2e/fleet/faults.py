"""What is done to a fleet at work. Each fault returns how long no GPU was granted, and leaves a fleet that is whole."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable, Sequence
from functools import partial

from tests.e2e.worker import NoAnswer, now, parse

from .fleet import LIMIT_S, Box, Candidate, Fleet, until

PASSED_ON = {200, 201, 202, 503}


def kill_leader(fleet: Fleet) -> float:
    leader = fleet.leader()
    began = now()
    leader.kill()
    took_s = _grants_go_on(fleet, leader, began)
    leader.start()
    return took_s


def kill_leader_and_holder(fleet: Fleet) -> float:
    """Nobody sees the holder die; the next leader must notice."""
    leader = fleet.leader()
    began = now()
    leader.kill()
    fleet.kill_worker("w0")
    took_s = _grants_go_on(fleet, leader, began)
    leader.start()
    return took_s


def stop_leader(fleet: Fleet) -> float:
    """SIGSTOP. What was sent to the stopped leader is read after SIGCONT, when another one leads: it is passed on to that,
    or refused.
    """
    leader = fleet.leader()
    held = _ask_for_own(leader)
    began = now()
    leader.send(signal.SIGSTOP)
    renewal = send(leader, "POST", "/fleet/leases/renew", json.dumps({"ids": [held]}))
    request = send(leader, "PUT", f"/fleet/leases/late-{held}", "{}")
    took_s = _grants_go_on(fleet, leader, began)
    leader.send(signal.SIGCONT)
    for connection in (renewal, request):
        status = read(connection)
        assert status in PASSED_ON, f"a leader that was stopped answered with {status} when another one led"
    _assert_kept(fleet, held, leader)
    return took_s


def partition_leader(fleet: Fleet) -> float:
    """Its packets to the database are dropped, and later arrive after all. Its callers still reach it."""
    leader = fleet.leader()
    held = _ask_for_own(leader)
    began = now()
    leader.proxy.cut()
    request = send(leader, "PUT", f"/fleet/leases/late-{held}", "{}")
    took_s = _grants_go_on(fleet, leader, began)
    status, answer = leader.call("POST", "/fleet/leases/renew", {"ids": [held]})
    assert status in PASSED_ON, f"a renewal at a leader that was cut off: {status} {answer}"
    assert read(request) in PASSED_ON
    leader.proxy.restore()
    _assert_kept(fleet, held, leader)
    return took_s


def hand_over(fleet: Fleet) -> float:
    leader = fleet.leader()
    began = now()
    leader.send(signal.SIGTERM)
    took_s = _grants_go_on(fleet, leader, began)
    assert leader.process is not None
    assert leader.process.wait(LIMIT_S) in {0, -signal.SIGTERM}
    leader.start()
    return took_s


def kill_database(fleet: Fleet) -> float:
    fleet.leader()
    fleet.database.kill()
    _until_nobody_leads(fleet)
    fleet.database.start()
    return _grants_go_on(fleet, None, now())


def stop_database(fleet: Fleet) -> float:
    """All its processes, so that connections stay and nothing is answered."""
    fleet.leader()
    fleet.database.send_to_all(signal.SIGSTOP)
    try:
        _until_nobody_leads(fleet)
    finally:
        fleet.database.send_to_all(signal.SIGCONT)
    return _grants_go_on(fleet, None, now())


Fault = Callable[[Fleet], float]
OF_LEADER: Sequence[Fault] = (kill_leader, stop_leader, partition_leader)
ALL: Sequence[Fault] = (*OF_LEADER, kill_leader_and_holder, hand_over, kill_database, stop_database)


def _grants_go_on(fleet: Fleet, old: Candidate | None, began: float) -> float:
    """How long it took until a worker has a GPU that another leader granted."""
    new = fleet.leader([each for each in fleet.candidates if each is not old])
    before = _active(new)
    # Fences are those of each node, so they do not tell: the node of the highest one may be the one that is away.
    until(lambda: not _active(new) <= before, "a GPU is granted again")
    return now() - began


def work_on(fleet: Fleet, grants: int = 10) -> None:
    """Let the workers hold GPUs for a while, so many times."""
    leader = fleet.leader()
    fence = _highest_fence(leader)
    until(lambda: _highest_fence(leader) >= fence + grants, f"{grants} grants")


def _active(leader: Candidate) -> set[str]:
    """The leases that have GPUs; empty where there is no answer."""
    try:
        status, answer = leader.call("GET", "/fleet/pool")
    except NoAnswer:
        return set()
    assert status == 200, answer
    return {lease["id"] for lease in answer["leases"] if lease["state"] == "active"}


def _highest_fence(leader: Candidate) -> int:
    try:
        status, answer = leader.call("GET", "/fleet/pool")
    except NoAnswer:
        return 0
    assert status == 200, answer
    return max((lease["fence"] for lease in answer["leases"] if lease["fence"]), default=0)


def _until_nobody_leads(fleet: Fleet) -> None:
    # Until its trust is over, a leader that can write nothing still takes renewals.
    roles = [partial(_role, candidate) for candidate in fleet.candidates]
    until(lambda: not any(role() == "leader" for role in roles), "nobody leads")
    for candidate in fleet.candidates:
        for method, path, body in (("PUT", "/leases/no", {}), ("POST", "/leases/renew", {"ids": ["no"]})):
            status, answer = candidate.call(method, path, body)
            if status == 502:  # its link to the leader ended with this call, and it says to make the call again
                status, answer = candidate.call(method, path, body)
            assert status == 503, f"without a database: {method} {path} is {status} {answer}"


def _role(candidate: Candidate) -> str:
    return str(candidate.health().get("fleet", {}).get("role"))


def _ask_for_own(leader: Candidate) -> str:
    """A lease of a remote holder: the test itself. It waits in the queue or is granted, and must be there later."""
    name = f"own-{leader.port}-{now():.6f}"
    status, answer = leader.call("PUT", f"/fleet/leases/{name}", {"ttl_s": 30.0})
    assert status in {201, 202}, answer
    return name


def _assert_kept(fleet: Fleet, lease: str, old: Candidate) -> None:
    """The lease is still there."""
    leader = fleet.leader(fleet.others(old))
    status, answer = leader.call("GET", f"/fleet/leases/{lease}")
    assert (status, answer.get("end_reason")) == (200, None), answer
    if leader.call("GET", f"/fleet/leases/late-{lease}")[0] == 200:
        assert leader.call("DELETE", f"/fleet/leases/late-{lease}")[0] == 200
    assert leader.call("DELETE", f"/fleet/leases/{lease}")[0] == 200
    until(lambda: _role(old) == "follower", "the old leader follows")


def send(candidate: Box, method: str, path: str, body: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", candidate.port), timeout=LIMIT_S)
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall((head + body).encode())
    return connection


def read(connection: socket.socket) -> int:
    received = b""
    with connection:
        while (answer := parse(received)) is None:
            chunk = connection.recv(65536)
            assert chunk, f"cut off after {received!r}"
            received += chunk
    return answer[0]
