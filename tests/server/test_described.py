"""The OpenAPI document describes every key of every real answer of a busy pool."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from gpu_worker_pool.server.app import create_app
from gpu_worker_pool.server.http.pool_route import PoolRoute
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.testing import ServerProcess
from tests.server.described import undescribed

TOKEN = "a-token-of-the-admin"  # noqa: S105 - of a server that lives for seconds
ADA = "a-token-of-an-owner"
AS_ADMIN = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    settings = {"SIMULATED_GPUS": "4", "GPU_POOL_TOKENS": f"admin:{TOKEN},ada:{ADA}"}
    with ServerProcess(settings) as running:
        yield running


@pytest.fixture(scope="module")
def document(server: ServerProcess) -> dict[str, Any]:
    found: dict[str, Any] = server.json("/openapi.json")
    return found


def call(server: ServerProcess, path: str, method: str = "GET", body: Any = None) -> tuple[int, Any]:
    answer = server.ask(path, method, body=body, headers=AS_ADMIN)
    return answer.status, json.loads(answer.body)


def faults(document: Mapping[str, Any], method: str, path: str, status: int, answer: Any) -> list[str]:
    described = document["paths"][path][method.lower()]["responses"][str(status)]["content"]
    (content,) = described.values()
    return list(
        undescribed(content["schema"], answer, document["components"]["schemas"], f"{method} {path} {status} $")
    )


def test_no_key_of_any_answer_is_undescribed(server: ServerProcess, document: dict[str, Any]) -> None:
    found: list[str] = []
    asked: set[tuple[str, str]] = set()

    def ask(method: str, path: str, described_at: str | None = None, body: Any = None) -> Any:
        status, answer = call(server, path, method, body)
        place = described_at or path.partition("?")[0]
        found.extend(faults(document, method, place, status, answer))
        asked.add((method, place))
        return answer

    lease = "/leases/{lease_id}"
    with_json = {
        (method.upper(), path)
        for path, calls in document["paths"].items()
        for method, described in calls.items()
        if "application/json" in described["responses"]["200"]["content"]
    }
    ask("PUT", "/leases/whole", lease, {"gpus": 2, "labels": {"command": "train"}, "worker_id": "w", "host": "far"})
    ask(
        "PUT",
        "/leases/shared?devices=uuid",
        lease,
        {"memory_mb": 1000, "pid": os.getpid(), "host": socket.gethostname()},
    )
    ask("PUT", "/leases/shared-too", lease, {"memory_mb": 500, "priority": 3})
    ask("POST", "/admin/gpus/3/drain", "/admin/gpus/{gpu}/drain", {"reason": "dust"})
    ask("PUT", "/leases/waits", lease, {"gpus": 2, "memory_threshold_percent": 50, "among": [0, 1]})
    ask("PUT", "/leases/waits-too", lease, {"gpus": 1, "model": "*"})
    ask("PUT", "/leases/whole", lease, {"gpus": 1})  # a conflict
    ask("PUT", "/leases/bad", lease, {"gpus": 0})
    ask("GET", "/leases/waits", lease)
    ask("GET", "/leases/whole", lease)
    ask("GET", "/leases/none", lease)
    ask("GET", "/leases/whole/wanted", f"{lease}/wanted")
    ask("POST", "/leases/renew", body={"ids": ["whole", "waits", "none"]})
    ask("PUT", "/admin/ignored-processes/Xorg", "/admin/ignored-processes/{name}")
    ask("DELETE", "/admin/ignored-processes/Xorg", "/admin/ignored-processes/{name}")
    span = {"starts_at": "2099-01-01", "ends_at": "2099-01-02T12:00:00Z"}
    ask("PUT", "/bookings/course", "/bookings/{booking_id}", {"gpus": 2, "reason": "a course", **span})
    ask("PUT", "/quotas/ada", "/quotas/{owner}", {"gpus": 1})
    ask("PUT", "/quotas/*", "/quotas/{owner}", {"weight": 2})
    ask("PUT", "/quotas/bad", "/quotas/{owner}", {"gpus": -1})
    digest = "ab" * 32
    ask(
        "PUT",
        f"/admin/tokens/{digest}",
        "/admin/tokens/{digest}",
        {"name": "ada", "role": "operator", "note": "pc"},
    )
    ask("PUT", f"/admin/tokens/{digest}", "/admin/tokens/{digest}", {"name": "bob"})
    ask("GET", "/admin/tokens")
    ask("DELETE", f"/admin/tokens/{digest}", "/admin/tokens/{digest}")
    ask("PUT", "/groups/vision", "/groups/{name}", {"members": ["ada"], "quota": 4, "first_right": ["0"]})
    ask("GET", "/groups")
    ask("GET", "/quotas")
    ask("GET", "/bookings")
    ask("DELETE", "/quotas/ada", "/quotas/{owner}")
    ask("DELETE", "/groups/vision", "/groups/{name}")
    ask("DELETE", "/bookings/course", "/bookings/{booking_id}")
    for path in ("/leases", "/pool", "/pool?queue=1", "/ui/data/pool", "/timeline", "/forecast"):
        ask("GET", path)
    ask("DELETE", "/leases/shared", lease)
    ask("POST", "/admin/leases/whole/revoke", "/admin/leases/{lease_id}/revoke")
    ask("GET", "/leases/whole", lease)
    ask("POST", "/admin/gpus/3/undrain", "/admin/gpus/{gpu}/undrain")
    for method, path in with_json:
        if method == "GET" and "{" not in path:
            ask("GET", path)

    assert found == []
    assert asked == with_json


def test_who_may_call_is_what_the_routes_say(server: ServerProcess) -> None:
    """Through a proxy no caller is local; a token that is not the admin's does not make an administrator."""
    app = create_app(ServerSettings(_env_file=None, simulated_gpus="1"))
    routes = [route.declared for route in app.routes if isinstance(route, PoolRoute) and route.include_in_schema]
    for route in routes:
        if route.path in {"/events", "/ui/data/me"} or route.is_fleet:
            continue  # the first never ends, the second says whose a token is, and here is no fleet
        path = re.sub(r"\{\w+:path\}", "a", route.path)

        def status(**headers: str) -> int:
            return server.ask(path, route.method, headers, b"{}").status  # noqa: B023

        without_token, with_token = status(**{"X-Forwarded-For": "192.0.2.1"}), status(Authorization=f"Bearer {ADA}")
        assert (without_token == 401) == (route.caller != "anyone"), (route, without_token)
        assert (with_token == 403) == (route.caller in {"operator", "admin"}), (route, with_token)
