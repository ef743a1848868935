"""The page's addresses, files and data over real connections, below a prefix."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import signal
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from typing import Any

import pytest

import gpu_worker_pool
from gpu_worker_pool.server.routes.page import TYPES, PageFiles
from gpu_worker_pool.testing import Answer, ServerProcess
from tests.server.leasing import OFTEN, assert_problem, eventually

PREFIX = "/gpu-pool"
ANN, ADMIN = "the-own-token-of-ann", "the-admins-token"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    settings = {
        "SIMULATED_GPUS": "1",
        "GPU_POOL_NODE": "box1",
        "TITLE": "Our GPUs",
        "API_PREFIX": PREFIX,
        "GPU_POOL_TOKENS": f"ann:{ANN},admin:{ADMIN}",
    }
    with ServerProcess({**settings, **OFTEN}) as running:
        yield running


def ask(server: ServerProcess, path: str, method: str = "GET", **headers: str) -> Answer:
    return server.ask(f"{PREFIX}{path}", method, {name.replace("_", "-"): text for name, text in headers.items()})


def data(server: ServerProcess, name: str) -> Any:
    answer = ask(server, f"/ui/data/{name}")
    assert answer.status == 200, answer
    return answer.json


def act(server: ServerProcess, path: str, method: str, token: str = ADMIN, body: Any = None) -> Any:
    answer = server.ask(f"{PREFIX}{path}", method, {"Authorization": f"Bearer {token}"}, body)
    assert answer.status in {200, 201, 202}, answer
    return answer.json


def assert_is_the_pages(answer: Answer) -> None:
    """What is below /ui is safe to show, and for no page of another origin."""
    assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS
    assert not [name for name in answer.headers if name.startswith("access-control")]


# --- addresses -------------------------------------------------------------------------------------------------------


def test_every_file_is_served_as_what_it_is_and_not_sent_twice(server: ServerProcess) -> None:
    """The page names each file below the version of all of them, so that a browser keeps it until another version is there."""
    names, version = PageFiles().by_name.keys(), PageFiles().version
    assert {"index.html", "page.css", "app.js", "vendor/preact.js"} <= names
    named = re.findall(r'(?:href|src)="ui/([^"]+)"', ask(server, "/ui").body.decode())
    assert {f"{version}/{name}" for name in names if name.endswith((".js", ".css"))} <= set(named)
    for name in names - {"index.html"}:
        kept, plain, old = (ask(server, f"/ui/{path}{name}") for path in (f"{version}/", "", "v-of-another/"))
        assert (kept.status, kept.body) == (200, plain.body) == (200, old.body), name
        assert kept.headers["content-type"] == TYPES[f".{name.rpartition('.')[2]}"]
        assert kept.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert plain.headers["cache-control"] == old.headers["cache-control"] == "no-cache"
        packed = ask(server, f"/ui/{version}/{name}", Accept_Encoding="gzip")
        assert (packed.headers["content-encoding"], gzip.decompress(packed.body)) == ("gzip", kept.body)
        assert packed.headers["vary"] == "Accept-Encoding"
        assert_is_the_pages(kept)
        etag = kept.headers["etag"]
        for known in (etag, f'"other", W/{etag}', "*"):
            again = ask(server, f"/ui/{name}", If_None_Match=known)
            assert (again.status, again.body, again.headers["etag"]) == (304, b"", etag)
            assert_is_the_pages(again)
        assert ask(server, f"/ui/{name}", If_None_Match='"other"').status == 200


# --- data ------------------------------------------------------------------------------------------------------------


def test_the_pool_is_shown_as_the_pool_is_with_what_happened(server: ServerProcess) -> None:
    act(server, "/leases/holder", "PUT", ANN, {"worker_id": "w1", "labels": {"command": "train.py"}})
    act(server, "/leases/waiter", "PUT", body={"worker_id": "w2"})
    act(server, "/admin/gpus/0/drain", "POST", body={"reason": "dust"})
    act(server, "/admin/gpus/0/undrain", "POST")
    shown = data(server, "pool")

    pool = server.json(f"{PREFIX}/pool?queue=200")
    assert shown["pool"].keys() == pool.keys()
    assert [lease["id"] for lease in shown["pool"]["leases"]] == ["holder"]
    assert [lease["id"] for lease in shown["pool"]["queue"]] == ["waiter"]
    for key in ("node", "server_id", "thresholds", "queue_length"):
        assert shown["pool"][key] == pool[key]
    (gpu,) = pool["gpus"]
    happened = shown["happened"]
    assert [item["kind"] for item in happened] == ["in_service", "out_of_service", "queued", "granted"]
    where = {"node": "box1", "uuid": gpu["uuid"], "gpu_id": 0, "name": gpu["name"]}
    granted = {"kind": "granted", "lease_id": "holder", "owner": "ann", "worker_id": "w1", "label": "train.py"}
    assert {key: value for key, value in happened[3].items() if key != "at" and value} == {**granted, "gpus": [where]}
    assert happened[1]["reason"] == "dust"
    times = [shown["started_at"], *(item["at"] for item in reversed(happened)), shown["now"]]
    assert times == sorted(times)
    measured_at, now = shown["measured_at"], datetime.fromisoformat(shown["now"]).timestamp()
    assert measured_at <= now + 0.001
    assert shown["reading_age_s"] >= 0
    assert (shown["stale_after_s"], shown["refresh_interval_s"], shown["max_history"]) == (5.0, 0.05, 100)
    assert (shown["has_tokens"], shown["title"]) == (True, "Our GPUs")
    assert shown["version"] == gpu_worker_pool.__version__
    for lease_id in ("waiter", "holder"):
        act(server, f"/leases/{lease_id}", "DELETE")


def test_until_when_a_lease_is_predicted_to_last_is_told(server: ServerProcess) -> None:
    for lease_id in ("first", "second", "third"):
        act(server, f"/leases/{lease_id}", "PUT", ANN, {"ttl_s": 600})
        if lease_id != "third":
            act(server, f"/leases/{lease_id}", "DELETE", ANN)
            eventually(lambda: server.json(f"{PREFIX}/pool")["gpus"][0]["state"] == "free", "it is free")
    (end,) = data(server, "pool")["ends"]
    assert end["lease_id"] == "third"
    assert datetime.fromisoformat(end["at"]) > datetime.fromisoformat(data(server, "pool")["started_at"])
    act(server, "/leases/third", "DELETE", ANN)


def test_a_forecast_tells_when_a_request_that_is_made_now_would_start(server: ServerProcess) -> None:
    def forecast(query: str = "") -> Any:
        return server.json(f"{PREFIX}/forecast{query}")

    eventually(lambda: forecast()["models"][0]["free"] == 1, "the GPU is free")
    free = forecast()
    (model,) = free["models"]
    (start,) = free["starts"]  # no box has more than one GPU
    assert (model["gpus"], model["free"], model["starts"]) == (1, 1, [start])
    assert (start["gpus"], start["at"], start["why"]) == (1, free["now"], None)

    act(server, "/leases/limited", "PUT", ANN, {"ttl_s": 600, "time_limit_s": 3600})
    ends_at = server.json(f"{PREFIX}/leases/limited")["ends_at"]
    (start,) = forecast()["starts"]
    assert (start["at"], start["basis"]) == (ends_at, "declared")
    eventually(lambda: data(server, "pool")["forecast"]["starts"][0]["at"] == ends_at, "the page has it too")
    (start,) = forecast("?gpus=2&model=A100")["starts"]
    assert start["at"] is None
    assert "this box has 1" in start["why"]
    assert_problem(ask(server, "/forecast?gpus=0"), 422)
    act(server, "/leases/limited", "DELETE", ANN)


def test_data_is_compressed_for_who_can_read_it_and_kept_by_nobody(server: ServerProcess) -> None:
    packed = ask(server, "/ui/data/pool", Accept_Encoding="gzip", Origin="http://elsewhere.example")
    assert packed.headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(packed.body))["pool"]["node"] == "box1"
    plain = ask(server, "/ui/data/pool")
    assert "content-encoding" not in plain.headers
    for answer in (packed, plain):
        assert (answer.headers["vary"], answer.headers["cache-control"]) == ("Accept-Encoding", "no-store")
        assert answer.headers["content-type"] == "application/json"
        assert_is_the_pages(answer)


def test_who_waits_for_data_or_listens_does_not_keep_the_server_from_stopping(server: ServerProcess) -> None:
    """The last test here: the server is gone after it."""
    assert server.process is not None
    waiting, page = (http.client.HTTPConnection("127.0.0.1", server.port, timeout=10) for _ in range(2))
    with closing(waiting), closing(page):
        page.request("GET", f"{PREFIX}/events?pace_s=60")
        heard = page.getresponse()
        assert ask(server, "/ui/data/pool").status == 200
        waiting.request("GET", f"{PREFIX}/ui/data/pool")  # for a while, since it was made just now
        assert ask(server, "/livez").status == 200
        server.process.send_signal(signal.SIGTERM)
        assert Answer.read(waiting).status in {200, 503}, "the latter unless it was made before the signal came"
        assert heard.read().endswith(b"\n\n")
    assert server.process.wait(timeout=20) in {0, -signal.SIGTERM}
    assert "Traceback" not in server.log()
    assert "never" not in server.log()
