"""Fifty waiters on one GPU are served in the order they asked."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.e2e.crowd import LIMIT_S, serving
from tests.e2e.worker import call

WAITERS = 50


def test_fifty_waiters_are_served_in_the_order_they_asked() -> None:
    served: list[tuple[int, int]] = []

    with serving(1) as server, ThreadPoolExecutor(WAITERS) as threads:

        def wait_for_it(number: int) -> None:
            """Wait, say so while the GPU is held, and release it."""
            path = f"/leases/waiter{number}"
            answer = {"state": "queued"}
            while answer["state"] == "queued":
                _, answer = call(server.port, "GET", f"{path}?wait_s=25", None, LIMIT_S)
            served.append((number, int(answer["fence"])))
            call(server.port, "DELETE", path, None, LIMIT_S)

        assert call(server.port, "PUT", "/leases/first", {"ttl_s": 60.0}, LIMIT_S)[0] == 201
        for number in range(WAITERS):
            status, answer = call(server.port, "PUT", f"/leases/waiter{number}", {"ttl_s": 60.0}, LIMIT_S)
            assert (status, answer["position"]) == (202, number + 1)
        waits = [threads.submit(wait_for_it, number) for number in range(WAITERS)]
        assert call(server.port, "DELETE", "/leases/first", None, LIMIT_S)[0] == 200
        for each in waits:
            each.result()

    assert [number for number, _ in served] == list(range(WAITERS))
    fences = [fence for _, fence in served]
    assert fences == sorted(set(fences))
