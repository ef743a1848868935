"""Random requests after the server's own description: no 5xx, no status or answer that is not described."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, given, settings

from gpu_worker_pool.testing import ServerProcess

if TYPE_CHECKING:
    import schemathesis

LEASE_CALLS = (
    *("/leases", "/pool", "/usage", "/timeline", "/admin", "/events"),
    *("/quotas", "/bookings"),
)


def test_the_server_keeps_to_its_own_description() -> None:
    import schemathesis  # noqa: PLC0415 - takes as long as all other imports of a worker
    from schemathesis.core.result import Ok  # noqa: PLC0415

    with ServerProcess() as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        calls = 0
        for found in schema.get_all_operations():
            assert isinstance(found, Ok)
            operation = found.ok()
            if operation.path.startswith(LEASE_CALLS):
                continue  # they change things or never end: see calls/test_lease_openapi.py

            @settings(max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy())
            def call(case: schemathesis.Case[Any]) -> None:
                case.call_and_validate(timeout=10)

            call()
            calls += 1
        assert calls >= 10
