"""The page's addresses, files and data over real connections, below a prefix."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import datetime
from typing import Any

import pytest

import gpu_worker_pool
from gpu_worker_pool.server.http.response import takes_gzip, wants_page
from gpu_worker_pool.server.routes.page import TYPES, PageFiles
from gpu_worker_pool.testing import Answer, ServerProcess
from tests.server.leasing import OFTEN, assert_problem, eventually

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"
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


@pytest.mark.parametrize(
    ("accept", "is_page"),
    [
        (BROWSER, True),
        ("text/html", True),
        ("TEXT/HTML;q=0.5, application/json;q=0.5", True),
        ("text/html;q=0.4, application/json;q=0.5", False),
        ("text/html;q=0.4, */*;q=0.8", False),
        ("application/json, text/html;q=0", False),
        ("text/html;q=0.0", False),
        ("application/json", False),
        ("*/*", False),
        ("text/*", False),
        ("", False),
        (None, False),
        ("text/html;q=nonsense", True),
        (", ;, text/html ; level=1 ; q=0.3 ,", True),
    ],
)
def test_who_would_rather_have_a_page(accept: str | None, is_page: bool) -> None:
    assert wants_page(accept) is is_page


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_browser_is_sent_to_the_page_and_a_program_gets_the_json(server: ServerProcess, method: str) -> None:
    browser, program = ask(server, "/", method, Accept=BROWSER), ask(server, "/", method, Accept="application/json")

    assert (browser.status, browser.headers["location"]) == (307, "ui")
    assert (program.status, program.headers["content-type"]) == (200, "application/json")
    for answer in (browser, program):
        assert "Accept" in re.split(", *", answer.headers["vary"])
    if method == "GET":
        assert program.json["endpoints"][f"{PREFIX}/ui"]


def test_from_an_address_above_one_is_sent_on_without_being_told_a_host(server: ServerProcess) -> None:
    above = server.ask(PREFIX, headers={"X-Forwarded-Proto": "https"})
    assert (above.status, above.headers["location"]) == (307, f"{PREFIX.rpartition('/')[2]}/")
    root = server.ask("/", headers={"Accept": "text/html"})
    assert (root.status, root.headers["location"]) == (307, f"{PREFIX[1:]}/ui")
    assert server.ask("/").status == 404  # a program


def test_the_page_is_there_with_and_without_a_slash(server: ServerProcess) -> None:
    page = ask(server, "/ui")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.body.lower().startswith(b"<!doctype html>")
    assert_is_the_pages(page)
    slash = ask(server, "/ui/")
    assert (slash.status, slash.headers["location"]) == (307, "../ui")
    assert_is_the_pages(slash)
    head = ask(server, "/ui", "HEAD")
    assert (head.status, head.body, head.headers["content-length"]) == (200, b"", str(len(page.body)))


def test_every_file_is_served_as_what_it_is_and_not_sent_twice(server: ServerProcess) -> None:
    names = frozenset(PageFiles()._paths)
    assert {"index.html", "page.css"} <= names
    assert any(name.endswith(".js") for name in names)
    for name in names - {"index.html"}:
        file = ask(server, f"/ui/{name}")
        assert file.status == 200, name
        assert file.headers["content-type"] == TYPES[f".{name.rpartition('.')[2]}"]
        assert file.headers["cache-control"] == "no-cache"
        assert_is_the_pages(file)
        for known in (file.headers["etag"], f'"other", W/{file.headers["etag"]}', "*"):
            again = ask(server, f"/ui/{name}", If_None_Match=known)
            assert (again.status, again.body, again.headers["etag"]) == (304, b"", file.headers["etag"])
            assert_is_the_pages(again)
        assert ask(server, f"/ui/{name}", If_None_Match='"other"').status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/ui/index.html",
        "/ui/nothing.js",
        "/ui/../app.py",
        "/ui/%2e%2e/app.py",
        "/ui/..%2fapp.py",
        "/ui//etc/passwd",
        "/ui/page.css/",
        "/ui/data",
        "/ui/data/",
        "/ui/data/nothing",
        "/ui/__init__.py",
    ],
)
def test_what_is_not_there_is_not_found_whatever_the_path_looks_like(server: ServerProcess, path: str) -> None:
    answer = ask(server, path)
    assert_problem(answer, 404)
    if "%2e" not in path:
        assert_is_the_pages(answer)


@pytest.mark.parametrize("path", ["/ui", "/ui/page.css", "/ui/data/pool"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_there_is_nothing_to_change(server: ServerProcess, path: str, method: str) -> None:
    answer = ask(server, path, method, Origin="http://elsewhere.example", Access_Control_Request_Method="GET")
    assert_problem(answer, 405)
    assert answer.headers["allow"] == "GET, HEAD"
    assert_is_the_pages(answer)


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
    assert {key: shown["pool"][key] for key in ("node", "server_id", "thresholds", "queue_length")} == {
        key: pool[key] for key in ("node", "server_id", "thresholds", "queue_length")
    }
    (gpu,) = pool["gpus"]
    happened = shown["happened"]
    assert [item["kind"] for item in happened] == ["in_service", "out_of_service", "queued", "granted"]
    where = {"node": "box1", "uuid": gpu["uuid"], "gpu_id": 0, "name": gpu["name"]}
    assert {**happened[3], "at": None} == {
        "at": None,
        "kind": "granted",
        "lease_id": "holder",
        "owner": "ann",
        "worker_id": "w1",
        "label": "train.py",
        "gpus": [where],
        "reason": None,
        "by": None,
        "note": None,
    }
    assert happened[1]["reason"] == "dust"
    times = [shown["started_at"], *(item["at"] for item in reversed(happened)), shown["now"]]
    assert times == sorted(times)
    measured_at, now = shown["measured_at"], datetime.fromisoformat(shown["now"]).timestamp()
    assert measured_at <= now + 0.001
    assert shown["reading_age_s"] >= 0
    assert (shown["stale_after_s"], shown["refresh_interval_s"], shown["max_history"]) == (5.0, 0.05, 100)
    assert (shown["has_tokens"], shown["title"]) == (True, "Our GPUs")
    assert shown["version"] == gpu_worker_pool.__version__
    seen = eventually(lambda: server.json(f"{PREFIX}/pool")["gpus"][0]["processes"], "the holder is seen on the GPU")
    assert [(process["lease_ids"], process["is_outside"], process["is_ignored"]) for process in seen] == [
        ([], None, False)
    ], "where the holder runs is not known, so it cannot be told"
    for lease_id in ("waiter", "holder"):
        act(server, f"/leases/{lease_id}", "DELETE")


def test_the_weeks_end_with_this_one_and_have_the_hours_of_each_owner(server: ServerProcess) -> None:
    act(server, "/leases/of-weeks", "PUT", ANN, {"ttl_s": 600})
    act(server, "/leases/of-weeks", "DELETE", ANN)
    for weeks in (4, 12):
        answer = data(server, f"weeks?weeks={weeks}")
        starts = [datetime.fromisoformat(week["since"]).astimezone() for week in answer["weeks"]]
        assert len(starts) == weeks
        assert {(start.weekday(), start.hour, start.minute) for start in starts} == {(0, 0, 0)}
        assert starts[-1] <= datetime.fromisoformat(answer["until"])
        (ann,) = [row["gpu_hours"] for row in answer["owners"] if row["owner"] == "ann"]
        assert (len(ann), ann[:-1]) == (weeks, [0.0] * (weeks - 1))
    assert_problem(ask(server, "/ui/data/weeks?weeks=5"), 422)


def test_the_rest_is_as_the_calls_of_these_names_have_it(server: ServerProcess) -> None:
    usage = data(server, "usage")
    assert usage.keys() == server.json(f"{PREFIX}/usage").keys()
    since = datetime.fromisoformat(usage["since"]).astimezone()
    assert (since.hour, since.minute, since.second) == (0, 0, 0)
    six, day = data(server, "timeline"), data(server, "timeline?hours=24")
    assert six.keys() == day.keys() == server.json(f"{PREFIX}/timeline").keys()
    assert (_span_h(six), _span_h(day)) == (6, 24)
    history = data(server, "history")
    (line,) = history["gpus"].values()
    assert len(line["memory_percent"]) == len(line["utilization_percent"]) == len(history["measured_at"]) > 0


def _span_h(timeline: Mapping[str, str]) -> int:
    since, until = (datetime.fromisoformat(timeline[name]) for name in ("since", "until"))
    return round((until - since).total_seconds() / 3600)


@pytest.mark.parametrize(
    "query", ["timeline?hours=2", "timeline?hours=", "timeline?hours=6.0", "timeline?day=1", "pool?queue=1"]
)
def test_a_question_that_is_not_possible_is_refused(server: ServerProcess, query: str) -> None:
    answer = ask(server, f"/ui/data/{query}")
    assert_problem(answer, 422)
    assert_is_the_pages(answer)
    if "hours" in query:
        assert "1, 6, 24, 168" in answer.json["detail"]


@pytest.mark.parametrize(
    ("accepted", "is_gzip"),
    [
        ("gzip, deflate, br", True),
        ("br, GZIP;q=0.5", True),
        ("gzip;q=0", False),
        ("identity", False),
        ("*", False),
        (None, False),
    ],
)
def test_who_can_read_gzip(accepted: str | None, is_gzip: bool) -> None:
    assert takes_gzip(accepted) is is_gzip


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


def test_whose_a_token_is(server: ServerProcess) -> None:
    for token, whose in (
        (ANN, {"name": "ann", "is_admin": False, "role": "user"}),
        (ADMIN, {"name": "admin", "is_admin": True, "role": "administrator"}),
    ):
        answer = ask(server, "/ui/data/me", Authorization=f"Bearer {token}")
        assert (answer.status, answer.json) == (200, whose)
        assert_is_the_pages(answer)
    for headers in (
        {"X_Forwarded_For": "192.0.2.1"},
        {"Authorization": "Bearer wrong-token"},
        {"Authorization": "nonsense"},
    ):
        refused = ask(server, "/ui/data/me", **headers)
        assert_problem(refused, 401)
        assert refused.headers["www-authenticate"].startswith("Bearer")
    elsewhere = ask(server, "/ui/data/me", Authorization=f"Bearer {ANN}", Sec_Fetch_Site="cross-site")
    assert_problem(elsewhere, 403)


# --- what it hears ---------------------------------------------------------------------------------------------------


def test_it_hears_that_something_happened(server: ServerProcess) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", f"{PREFIX}/events?pace_s=0.1")
    response = connection.getresponse()
    assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
    lines = [response.readline().decode().rstrip("\n") for _ in range(9)]
    connection.close()
    assert lines == ["retry: 1000", ": connected", "", *2 * ["event: changed", "data: {}", ""]]


@pytest.mark.parametrize("pace", ["0.09", "60.1", "", "x", "nan", "-1"])
def test_a_pace_that_is_none_is_refused(server: ServerProcess, pace: str) -> None:
    answer = ask(server, f"/events?pace_s={pace}")
    assert_problem(answer, 422)
    assert "0.1 to 60" in answer.json["detail"]


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
