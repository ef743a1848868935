"""The router is made from the table and the handlers, and from nothing else."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.types import Message

from gpu_worker_pool.host.users import Users
from gpu_worker_pool.server.app import create_app
from gpu_worker_pool.server.encoding import encode
from gpu_worker_pool.server.http.access import AccessRules
from gpu_worker_pool.server.http.call import Call, Handlers
from gpu_worker_pool.server.http.openapi import make_document
from gpu_worker_pool.server.http.problems import Refusal
from gpu_worker_pool.server.http.response import Response
from gpu_worker_pool.server.http.router import PIECE_BYTES, Router
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.wire.routes import TABLE, Parameter, Resource, Route
from gpu_worker_pool.wire.service import Alive


@dataclass(frozen=True, slots=True, kw_only=True)
class Fortune(Alive):
    """A body with one more field than before."""

    luck: int


TIMES = Parameter("times", "How often.", 1, is_whole=True)
FORTUNES = Resource(
    "/fortunes/{name}",
    "GET: the fortune of a name",
    (Route("GET", "fortune", "A fortune", Fortune, (422,), query=(TIMES,)),),
    tag="leases",
)


async def fortune(call: Call) -> Response:
    times = call.query(TIMES)["times"]
    return Response(200, encode(Fortune(status="alive", source=call.parameters["name"], luck=7 * times)))


def make_router(*resources: Resource, handlers: Handlers, prefix: str = "") -> Router:
    return Router(
        resources,
        (handlers,),
        prefix=prefix,
        rules=AccessRules(),
        users=Users(),
        enable_cors=True,
        page_headers=((b"x-page", b"1"),),
    )


class Answer:
    def __init__(self, messages: list[Message]) -> None:
        start, *bodies = messages
        self.status: int = start["status"]
        self.headers = {name.decode(): value.decode() for name, value in start["headers"]}
        self.body = b"".join(message.get("body", b"") for message in bodies)

    @property
    def detail(self) -> str:
        detail: str = json.loads(self.body)["detail"]
        return detail


async def ask(router: Router, method: str, path: str, query: bytes = b"", **headers: str) -> Answer:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "query_string": query, "headers": raw, "client": None}
    await router(scope, receive, send)
    return Answer(sent)


# --- a new route: a line in the table, and a handler ---------------------------------------------------------------------


async def test_a_new_route_is_served_with_all_that_others_have() -> None:
    router = make_router(FORTUNES, handlers={"fortune": fortune}, prefix="/v1")

    answer = await ask(router, "GET", "/v1/fortunes/ada/lovelace", b"times=3")
    assert (answer.status, json.loads(answer.body)) == (200, {"status": "alive", "source": "ada/lovelace", "luck": 21})
    assert answer.headers["access-control-allow-origin"] == "*"
    assert (await ask(router, "HEAD", "/v1/fortunes/ada")).status == 200
    refused = await ask(router, "POST", "/v1/fortunes/ada")
    assert (refused.status, refused.headers["allow"]) == (405, "GET")
    assert (await ask(router, "GET", "/v1/fortunes/ada", b"times=x")).status == 422
    assert (await ask(router, "GET", "/v1/fortunes/ada", b"luck=1")).detail.startswith(
        "The query has an unknown parameter"
    )
    preflight = await ask(router, "OPTIONS", "/v1/fortunes/ada", origin="http://a", access_control_request_method="GET")
    assert (preflight.status, preflight.headers["access-control-allow-methods"]) == (200, "GET, HEAD")
    assert (
        await ask(router, "GET", "/fortunes/ada")
    ).detail == "There is nothing at /fortunes/ada; /v1/ lists all calls."


def test_a_new_route_and_a_new_field_are_described_without_another_line() -> None:
    document = make_document((*TABLE, FORTUNES), prefix="", title="t", version="1", description="d")
    call = document["paths"]["/fortunes/{name}"]["get"]
    assert [item["name"] for item in call["parameters"]] == ["name", "times"]
    assert set(call["responses"]) == {"200", "422"}
    fortune_schema = document["components"]["schemas"]["Fortune"]
    assert list(fortune_schema["properties"]) == fortune_schema["required"] == ["status", "source", "luck"]


# --- the start fails unless every route has exactly one handler ----------------------------------------------------------


def test_a_route_without_a_handler_fails_the_start() -> None:
    with pytest.raises(ValueError, match=r"the route fortune \(GET\) has no handler"):
        make_router(FORTUNES, handlers={})


def test_a_handler_without_a_route_fails_the_start() -> None:
    with pytest.raises(ValueError, match="these handlers have no route in the table: horoscope"):
        make_router(FORTUNES, handlers={"fortune": fortune, "horoscope": fortune})


def test_two_handlers_of_one_route_fail_the_start() -> None:
    with pytest.raises(ValueError, match="these routes have two handlers: fortune"):
        Router((FORTUNES,), ({"fortune": fortune}, {"fortune": fortune}), prefix="", rules=AccessRules(), users=Users(), enable_cors=True, page_headers=())  # fmt: skip


def test_every_route_of_the_table_has_a_handler_in_the_application() -> None:
    create_app(ServerSettings(_env_file=None, simulated_gpus="1"))


def test_no_route_is_declared_twice() -> None:
    names = [route.name for resource in TABLE for route in resource.routes]
    assert len(names) == len(set(names))
    assert len({resource.path for resource in TABLE}) == len(TABLE)


# --- whatever a handler does ---------------------------------------------------------------------------------------------


def one(handler: Any, **options: Any) -> Router:
    resource = Resource("/one", None, (Route("GET", "one", "One", None),), **options)
    return make_router(resource, handlers={"one": handler})


async def test_a_fault_of_ours_is_a_problem_and_stands_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(_: Call) -> Response:
        raise ZeroDivisionError("oh no")

    answer = await ask(one(fail), "GET", "/one")
    assert (answer.status, answer.headers["content-type"]) == (500, "application/problem+json")
    assert answer.detail == "The server failed on this request; its log says why."
    assert "oh no" not in answer.body.decode()
    assert "oh no" in caplog.text


async def test_what_a_handler_refuses_is_answered_with_its_headers_and_those_of_the_page() -> None:
    async def refuse(_: Call) -> Response:
        raise Refusal(503, "Later.", {"Retry-After": "5"})

    answer = await ask(one(refuse, tag="page", cors="never"), "GET", "/one", origin="http://a")
    assert (answer.status, answer.detail, answer.headers["retry-after"]) == (503, "Later.", "5")
    assert answer.headers["x-page"] == "1"
    assert "access-control-allow-origin" not in answer.headers


async def test_a_body_in_pieces_is_closed_when_nobody_reads_it() -> None:
    closed: list[bool] = []

    async def pieces() -> Any:
        try:
            yield b"a"
            yield b"b"
        finally:
            closed.append(True)

    async def stream(_: Call) -> Response:
        return Response(200, pieces())

    assert (await ask(one(stream), "GET", "/one")).body == b"ab"
    assert (await ask(one(stream), "HEAD", "/one")).body == b""
    assert closed == [True]  # one that was never begun has nothing to close


@pytest.mark.parametrize("sizes", [[], [3, 4], [PIECE_BYTES + 1, 2], [1, 3 * PIECE_BYTES]])
async def test_a_body_in_parts_is_one_answer_of_known_length(sizes: list[int]) -> None:
    parts = [bytes([number]) * size for number, size in enumerate(sizes)]

    async def in_parts(_: Call) -> Response:
        return Response(200, parts)

    answer, head = [await ask(one(in_parts), method, "/one") for method in ("GET", "HEAD")]
    assert answer.body == b"".join(parts)
    assert answer.headers["content-length"] == head.headers["content-length"] == str(sum(sizes))


def names_of(table: tuple[Resource, ...]) -> Iterator[str]:
    yield from (f"{route.method} {resource.path}" for resource in table for route in resource.routes)


def test_who_may_call_is_said_of_every_route_that_writes() -> None:
    open_to_all = {
        f"{route.method} {resource.path}" for resource in TABLE for route in resource.routes if route.caller == "anyone"
    }
    assert {name for name in names_of(TABLE) if not name.startswith("GET ")} & open_to_all == set()
    assert {resource.path for resource in TABLE for route in resource.routes if route.caller == "admin"} == {
        *(resource.path for resource in TABLE if resource.path.startswith("/admin/")),
        "/quotas/{owner}",
    }


# --- large heads, and callers that read slowly ---------------------------------------------------------------------------


async def test_an_address_or_headers_that_are_too_large_are_refused_by_the_application_itself() -> None:
    router = make_router(FORTUNES, handlers={"fortune": fortune})
    assert (await ask(router, "GET", "/fortunes/ada", b"x" * 9_000)).status == 414
    assert (await ask(router, "GET", f"/fortunes/{'a' * 9_000}")).detail == (
        "The address has 9010 bytes; there must be at most 8192."
    )
    many = {f"x_{number}": "1" for number in range(101)}
    assert (await ask(router, "GET", "/fortunes/ada", b"", **many)).detail == (
        "There are 101 headers; there must be at most 100."
    )
    assert (await ask(router, "GET", "/fortunes/ada", x_long="x" * 70_000)).status == 431
    assert (await ask(router, "GET", "/fortunes/ada", x_long="x" * 60_000)).status == 200


async def test_a_slash_too_many_leads_to_a_relative_address_whatever_the_host_header_says() -> None:
    resource = Resource("/tales/one", "A tale", (Route("GET", "tale", "A tale", Alive),))
    router = make_router(resource, handlers={"tale": fortune})
    answer = await ask(router, "GET", "/tales/one/", b"a=1", host="evil.example")
    assert (answer.status, answer.headers["location"]) == (307, "../one?a=1")


class SlowReader:
    """Takes so many messages and no more."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.sent: list[Message] = []
        self.is_full = asyncio.Event()

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if len(self.sent) > self.most:
            self.is_full.set()
            await asyncio.Event().wait()

    async def receive(self) -> Message:
        return {"type": "http.request", "body": b""}


async def test_a_caller_that_reads_nothing_costs_one_piece_and_is_cut_off_when_the_server_stops() -> None:
    async def tale(_: Call) -> Response:
        return Response(200, b"x" * 10_000_000)

    resource = Resource("/tale", "A tale", (Route("GET", "tale", "A tale", Alive),))
    router, reader = make_router(resource, handlers={"tale": tale}), SlowReader(1)
    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": "/tale",
        "query_string": b"",
        "headers": [],
        "client": None,
    }
    served = asyncio.ensure_future(router(scope, reader.receive, reader.send))
    await reader.is_full.wait()
    assert sum(len(message.get("body", b"")) for message in reader.sent) == PIECE_BYTES
    router.stop()
    await served
    assert reader.sent[-1]["more_body"]


async def test_a_large_answer_arrives_whole_in_pieces() -> None:
    body = bytes(range(256)) * 1000

    async def tale(_: Call) -> Response:
        return Response(200, body)

    resource = Resource("/tale", "A tale", (Route("GET", "tale", "A tale", Alive),))
    answer = await ask(make_router(resource, handlers={"tale": tale}), "GET", "/tale")
    assert (answer.body, answer.headers["content-length"]) == (body, str(len(body)))


async def test_others_have_turns_while_a_caller_takes_a_large_answer_at_once() -> None:
    turns, seen = 0, []

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    class QuickReader(SlowReader):
        async def send(self, _: Message) -> None:
            """Take a piece without waiting, in the time that the kernel takes for one."""
            seen.append(turns)
            until = time.thread_time() + 0.001
            while time.thread_time() < until:
                pass

    async def tale(_: Call) -> Response:
        return Response(200, b"x" * (10 * PIECE_BYTES))

    reader, task = QuickReader(0), asyncio.create_task(others())
    head: dict[str, Any] = {"type": "http", "method": "GET", "path": "/one", "query_string": b"", "headers": []}
    await one(tale)(head, reader.receive, reader.send)
    task.cancel()
    assert seen[-1] > seen[1]
