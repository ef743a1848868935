"""A user of a candidate's machine listens where boxes look for their leader, and relays what they say to the real one.

It can pass on and stop. It learns nothing that it could use, makes no call in the name of a box, and repeats no frame.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from gpu_worker_pool.testing import Answer
from tests.ledger.postgres.server import PostgresServer

from .fleet import Box, Fleet, fleet_of, until

KEY = "a-key-that-is-long-enough"
TOKEN = "the-secret-token-of-ada"  # noqa: S105 - of nothing
# A call that counts as local is an administrator's in this test, which is the server's own user.
FROM_ELSEWHERE = {"X-Forwarded-For": "192.0.2.1"}


class Relay:
    """Passes connections on to the port `target`, and keeps what passes. `repeats` has the directions whose next piece it
    sends twice.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.target = 0
        self.seen: deque[bytes] = deque()
        self.repeats: set[str] = set()
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.connections += 1
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    near.close()
                    continue
                for direction, one, other in (("up", near, far), ("down", far, near)):
                    threading.Thread(target=self._pump, args=(direction, one, other), daemon=True).start()

    def _pump(self, direction: str, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError), closing(one), closing(other):
            while piece := one.recv(65536):
                self.seen.append(piece)
                other.sendall(piece)
                if direction in self.repeats and len(piece) < 2000:
                    self.repeats.discard(direction)
                    other.sendall(piece)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(scope="module")
def relay() -> Iterator[Relay]:
    with closing(Relay()) as found:
        yield found


@pytest.fixture(scope="module")
def fleet(postgres: PostgresServer, relay: Relay, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    postgres.create_database("relay")
    settings = {"GPU_POOL_FLEET_KEY": KEY, "GPU_POOL_FLEET_ADDRESS": relay.url}
    with fleet_of(postgres, "relay", tmp_path_factory.mktemp("fleet"), size=1, **settings) as fleet:
        relay.target = fleet.candidates[0].port
        yield fleet


@pytest.fixture(scope="module")
def agent(fleet: Fleet, relay: Relay) -> Iterator[Box]:
    with Box(relay.url, fleet.folder / "agent", GPU_POOL_FLEET_KEY=KEY) as agent:
        fleet.await_boxes(2)
        yield agent


def ask(box: Box, method: str, path: str, body: object, **headers: str) -> Answer:
    return box.ask(path, method=method, body=body, headers={**FROM_ELSEWHERE, **headers})


def test_what_passes_makes_nobody_an_administrator(fleet: Fleet, relay: Relay, agent: Box) -> None:
    (leader,) = fleet.candidates
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    assert leader.call("PUT", f"/admin/tokens/{digest}", {"name": "ada"})[0] == 200
    granted = ask(agent, "PUT", "/leases/of-ada", {"ttl_s": 60.0}, Authorization=f"Bearer {TOKEN}")
    assert granted.status == 201, granted
    seen = b"".join(relay.seen)
    assert b"of-ada" in seen, "the call passed there"

    assert TOKEN.encode() not in seen
    caller = {"name": "root", "is_local": True, "role": "administrator"}
    for key in {*re.findall(rb'"key": ?"([^"]+)"', seen), b"none"}:
        said = {"key": key.decode(), "node": "agent", "caller": caller, "uid": 0}
        forged = {"gpu-pool-forwarded": json.dumps(said)}
        assert (
            ask(leader, "PUT", f"/admin/tokens/{'0' * 64}", {"name": "eve", "role": "administrator"}, **forged).status
            == 401
        )
    assert {token["name"] for token in leader.json("/admin/tokens")["tokens"]} == {"ada"}
    assert leader.call("DELETE", "/leases/of-ada")[0] in {200, 404}


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_frame_that_is_repeated_ends_the_link(fleet: Fleet, relay: Relay, agent: Box, direction: str) -> None:
    before = relay.connections
    relay.repeats.add(direction)
    until(lambda: relay.connections > before and agent.health()["fleet"]["leader"], "the box has joined again")
    noticed_by = fleet.candidates[0] if direction == "up" else agent
    assert "forged, repeated or lost" in noticed_by.log()
    fleet.await_boxes(2)
