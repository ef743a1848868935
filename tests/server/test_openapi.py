"""Random requests after the server's own description: no 5xx, no status and no answer that is not described.

A stream has no end to check, so that /events is left to tests/server/streams/test_events.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_worker_pool.testing import ServerProcess
from tests.server.leasing import wait_until_free

if TYPE_CHECKING:
    import schemathesis

KNOWN = ("held", "waiting", "ended")
# They change something, or need what was changed.
PATHS = ("/leases", "/pool", "/usage", "/timeline", "/quotas", "/groups", "/bookings", "/admin")
# So that no example waits for minutes; that waiting ends in time is tested elsewhere.
LONGEST_WAIT_S = 0.02


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "2", "LOG_LEVEL": "warning"}) as running:
        yield running


def test_the_server_keeps_to_its_own_description(server: ServerProcess) -> None:
    import schemathesis  # noqa: PLC0415 - takes as long as all other imports of a worker
    from schemathesis.core.result import Ok  # noqa: PLC0415
    from schemathesis.specs.openapi.checks import (  # noqa: PLC0415
        content_type_conformance,
        positive_data_acceptance,
    )

    # 1,000 GPUs are well described and still too many; the types of content are held against the document below.
    left_out = [positive_data_acceptance, content_type_conformance]
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    calls = []
    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()
        if operation.path == "/events":
            continue
        if operation.path.startswith(PATHS):
            prepare(server)

        @settings(max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(), lease_id=st.sampled_from([None, *KNOWN]))
        def call(case: schemathesis.Case[Any], lease_id: str | None) -> None:
            shorten(case)
            for name in {"lease_id", "booking_id", "owner"} & case.path_parameters.keys() if lease_id else ():
                case.path_parameters[name] = lease_id
            excluded = left_out if case.operation.path.startswith(PATHS) else []
            case.call_and_validate(timeout=10, excluded_checks=excluded)

        call()
        calls.append((operation.method, operation.path))
    assert len(calls) >= 33, calls
    assert server.json("/health")["status"] == "healthy"


def prepare(server: ServerProcess) -> None:
    """Leases of every kind, so that not all that is asked for is unknown."""
    for lease in server.json("/leases")["leases"]:
        server.ask(f"/leases/{lease['id']}", "DELETE")
    for gpu in ("0", "1"):
        server.ask(f"/admin/gpus/{gpu}/undrain", "POST")
    for kind, name in (("bookings", "id"), ("quotas", "owner"), ("groups", "name")):
        for plan in server.json(f"/{kind}")[kind]:
            server.ask(f"/{kind}/{quote(plan[name], safe='')}", "DELETE")
    wait_until_free(server)
    for lease_id in KNOWN:
        server.ask(f"/leases/{lease_id}", "PUT", body={"gpus": 2})
    server.ask("/leases/ended", "DELETE")
    server.ask("/bookings/held", "PUT", body={"starts_at": "2999-01-01", "ends_at": "2999-01-02"})
    server.ask("/quotas/held", "PUT", body={"gpus": 2})
    server.ask("/groups/held", "PUT", body={"members": ["held"], "quota": 2})


def shorten(case: schemathesis.Case[Any]) -> None:
    forms: tuple[Any, ...] = (case.query, case.body)
    for form in forms:
        if isinstance(form, dict) and isinstance(form.get("wait_s"), int | float):
            form["wait_s"] = min(form["wait_s"], LONGEST_WAIT_S)
