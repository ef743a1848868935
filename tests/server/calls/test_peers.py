"""GET /peers: other servers as one of them sees them, whether they answer, hang, are dead or talk nonsense."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from gpu_worker_pool.server.calls.peers import (
    KEPT_S,
    MOST_BYTES,
    MOST_PEERS,
    WANTED_S,
    PeerCalls,
    parse_peers,
    read_pool,
)
from gpu_worker_pool.testing import ServerProcess
from gpu_worker_pool.wire.pool import PeersView
from gpu_worker_pool.wire.transport import CallFailed, Reply
from tests.server.described import assert_described
from tests.server.leasing import assert_problem, eventually, take
from tests.server.running import free_port
from tests.server.told_server import Told, told_server

POOL: dict[str, Any] = {"node": "odd", "server_id": "odd-1", "gpus": [], "queue": []}
# By the path of the peer.
ANSWERS = {
    "/pool": Told(json.dumps(POOL).encode()),
    "/garbage/pool": Told(b"<html>hello</html>"),
    "/list/pool": Told(b"[1, 2]"),
    "/huge/pool": Told(b'{"gpus": [], "more": "' + b"x" * MOST_BYTES + b'"}'),
    "/packed/pool": Told(b"\x1f\x8b and so on", headers={"Content-Encoding": "gzip"}),
    "/redirects/pool": Told(b"", 307, {"Location": "/pool"}),
}


# The parts


def replied(body: bytes) -> Reply:
    return Reply(200, None, 0.0, 0.0, body=body)


def test_of_a_queue_the_first_are_shown_and_what_is_no_pool_is_refused() -> None:
    pool = read_pool(replied(json.dumps({**POOL, "queue": list(range(300)), "new": {"a": None}}).encode()))
    assert json.loads(pool.body) == {**POOL, "queue": list(range(200)), "new": {"a": None}}
    assert (pool.node, pool.server_id) == ("odd", "odd-1")
    for body in (b"", b"[]", b"null", b"{}", b'{"gpus": 4}', b'{"gpus": NaN}', b"[" * 100_000, b'{"gpus":["\\ud800"]}'):
        with pytest.raises(CallFailed, match="is this a GPU server"):
            read_pool(replied(body))


def test_a_url_that_is_no_good_is_left_out_and_logged_without_its_secret(caplog: pytest.LogCaptureFixture) -> None:
    found = parse_peers(" http://gpu-2:8000/, gpu-3:8000,http://ada:hunter2@gpu-4,,http://GPU-2:8000,https://gpu-5/a")
    assert [peer.url for peer in found] == ["http://gpu-2:8000", "https://gpu-5/a"]
    assert caplog.text.count("it is left out") == 2
    assert "write http://gpu-3:8000" in caplog.text
    assert "hunter2" not in caplog.text

    assert len(parse_peers(",".join(f"http://gpu-{n}" for n in range(MOST_PEERS + 1)))) == MOST_PEERS
    assert f"only the first {MOST_PEERS}" in caplog.text


async def test_they_are_asked_while_somebody_looks_and_what_they_said_is_kept_for_a_while() -> None:
    now = 1000.0
    with told_server(ANSWERS) as odd:
        peers = PeerCalls(parse_peers(odd.url), own_id="own", clock=lambda: now, every_s=0.01)

        def seen() -> dict[str, Any]:
            (peer,) = json.loads(peers.encode())["peers"]
            return dict(peer)

        assert not odd.asked  # nobody has looked
        await peers.ensure_polling()
        assert seen() == {"url": odd.url, "node": "odd", "is_up": True, "error": None, "age_s": 0.0, "pool": POOL}

        asking = peers._polling
        assert asking is not None
        now += WANTED_S - 1
        await peers.ensure_polling()
        now += WANTED_S - 1
        assert not (await asyncio.wait([asking], timeout=0.05))[0]  # because somebody looked again
        now += 1
        await asyncio.wait_for(asking, 10)
        assert len(odd.asked) >= 2

    # It is gone now, which nobody notices before somebody looks again.
    now += KEPT_S - 2
    assert peers._polling is None
    await peers.ensure_polling()
    peer = seen()
    assert (peer["is_up"], peer["node"], peer["pool"]) == (False, "odd", POOL)
    assert peer["error"].startswith("cannot connect: ")
    assert KEPT_S - 2 <= peer["age_s"] <= KEPT_S
    now += 5
    assert (seen()["node"], seen()["pool"]) == ("odd", None)
    await peers.close()
    assert peers._polling is None


async def test_a_name_is_looked_up() -> None:
    with told_server(ANSWERS) as odd:
        port = odd.server_port
        peers = PeerCalls(parse_peers(f"http://localhost:{port},http://no-such-host.invalid"), own_id="own")
        await peers.ensure_polling()
        good, bad = json.loads(peers.encode())["peers"]
        await peers.close()
    assert good["is_up"] is True
    assert bad["is_up"] is not True  # a name server that takes long leaves it unknown


# The call


def test_each_peer_is_shown_as_it_is() -> None:
    odd_ways = ("garbage", "list", "huge", "packed", "redirects", "missing")
    first, second = ServerProcess({"GPU_POOL_NODE": "one"}), ServerProcess({"GPU_POOL_NODE": "two"})
    with told_server(ANSWERS) as odd, closing(socket.create_server(("127.0.0.1", 0))) as hanging:
        hangs, dead = f"http://127.0.0.1:{hanging.getsockname()[1]}", f"http://127.0.0.1:{free_port()}"
        urls = [second.url, first.url, hangs, dead, "nonsense", odd.url, *(f"{odd.url}/{way}" for way in odd_ways)]
        first.env["GPU_POOL_PEERS"] = ",".join(urls)
        with second, first:
            assert second.json("/peers") == {"peers": []}
            assert not odd.asked  # nobody has looked

            def look() -> dict[str, dict[str, Any]]:
                answer = first.json("/peers")
                # What another kind of server says is passed on as it is.
                assert_described(PeersView, {"peers": [{**peer, "pool": None} if peer["pool"] == POOL else peer for peer in answer["peers"]]})  # fmt: skip
                return {peer["url"]: peer for peer in answer["peers"]}

            def all_when(is_so: Callable[[dict[str, dict[str, Any]]], bool]) -> Callable[[], dict[str, dict[str, Any]]]:
                return lambda: peers if is_so(peers := look()) else {}

            lease = take(second, owner="ada")
            seen = eventually(all_when(lambda peers: bool(peers[second.url]["pool"])), "the other has answered")
            assert list(seen) == [url for url in urls if url not in {first.url, "nonsense"}]
            two = seen[second.url]
            assert (two["node"], two["is_up"], two["error"]) == ("two", True, None)
            assert two["pool"]["leases"][0]["id"] == lease["id"]
            assert two["pool"].keys() == second.json("/pool").keys()
            assert not seen[hangs]["is_up"]
            assert seen[odd.url]["pool"] == POOL

            second.kill()
            down = eventually(
                all_when(lambda peers: peers[hangs]["is_up"] is False and peers[second.url]["is_up"] is False),
                "who hangs and who was killed are down",
            )
            assert down[hangs]["error"] == "no answer within 3 s"
            assert (down[hangs]["age_s"], down[hangs]["node"], down[hangs]["pool"]) == (None, None, None)
            assert down[second.url]["error"] == down[dead]["error"] == "cannot connect: Connection refused"
            assert down[second.url]["pool"]["leases"][0]["id"] == lease["id"]  # what it said last
            assert down[second.url]["age_s"] > 0
            assert {url.rpartition("/")[2]: peer["error"] for url, peer in down.items() if f"{odd.url}/" in url} == {
                "garbage": "its answer is not JSON; is this a GPU server?",
                "list": "its answer is not a pool; is this a GPU server?",
                "huge": "its answer is larger than 2 MiB",
                "packed": "its answer is not JSON; is this a GPU server?",
                "redirects": "it redirects (status 307), which is not followed; give the address it leads to",
                "missing": "it answers with status 404; is this a GPU server with leases?",
            }

            token = {"Authorization": "Bearer a-secret", "Cookie": "a=b", "X-Forwarded-For": "10.0.0.1"}
            assert first.ask("/peers", headers=token).status == 200
            assert_problem(first.ask("/peers?url=http://elsewhere"), 422, "this call takes none")
            assert first.ask("/peers", "POST").headers["allow"] == "GET"
            assert "GPU_POOL_PEERS: 'nonsense' is not an endpoint URL" in first.log()
            assert "Traceback" not in first.log()
    assert {path.partition("/pool")[2] for path, _ in odd.asked} == {"?queue=200&leases=500"}
    assert {name for _, headers in odd.asked for name in headers} == {"host", "accept", "accept-encoding", "user-agent"}
