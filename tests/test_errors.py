from __future__ import annotations

import copy
import pickle
from datetime import UTC, datetime

import pytest

from gpu_worker_pool.errors import (
    EndpointError,
    NoEndpointAnsweredError,
    PoolError,
    RequestRefusedError,
    ServiceUnavailableError,
    StaleAssignmentError,
    WorkerTimeoutError,
)
from gpu_worker_pool.models import GlobalGPUAssignment

REASONS = {"server1": "connection refused", "server2": "HTTP 500"}
ASSIGNMENT = GlobalGPUAssignment("server1:2", "server1", 2, "worker-1", datetime(2026, 1, 2, tzinfo=UTC))
ERRORS = [
    PoolError("anything"),
    WorkerTimeoutError(),
    WorkerTimeoutError("in the caller's words"),
    WorkerTimeoutError(waited_s=2.5, reason="all 8 GPUs are leased"),
    StaleAssignmentError(),
    StaleAssignmentError(ASSIGNMENT, "the lease ran out"),
    ServiceUnavailableError(REASONS),
    NoEndpointAnsweredError(REASONS, waited_s=3.0),
    RequestRefusedError(REASONS),
    EndpointError("server1", "bad gateway", status=502, is_temporary=True),
    EndpointError("server1", "the token is not known", status=401, is_temporary=False),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_survives_the_way_to_another_process(error: PoolError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301 - our own
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.args == error.args
        assert vars(again) == vars(error)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (WorkerTimeoutError(), TimeoutError),
        (NoEndpointAnsweredError(), TimeoutError),
        (NoEndpointAnsweredError(), WorkerTimeoutError),
        (NoEndpointAnsweredError(), ServiceUnavailableError),
        (RequestRefusedError(), ValueError),
    ],
)
def test_an_error_is_caught_by_what_the_documents_catch(error: PoolError, kind: type[Exception]) -> None:
    assert isinstance(error, kind)


def test_a_timeout_says_how_long_why_and_what_to_do() -> None:
    error = WorkerTimeoutError(waited_s=30.0, reason="all 8 GPUs are leased.")

    assert str(error) == (
        "no GPU was granted within 30 s: all 8 GPUs are leased; "
        "wait longer (worker_timeout, or timeout= of the request) or ask for less"
    )
    assert (error.waited_s, error.reason) == (30.0, "all 8 GPUs are leased.")


def test_where_nobody_answered_nobody_is_told_to_wait_longer() -> None:
    error = NoEndpointAnsweredError({"server1": "connection refused"}, waited_s=3.0)

    assert str(error) == (
        "no GPU server answered within 3 s: server1: connection refused; "
        "check that the GPU servers are running and that the endpoint URLs are right"
    )
    assert (error.waited_s, error.reason) == (3.0, "server1: connection refused")


def test_a_stale_assignment_is_named() -> None:
    error = StaleAssignmentError(ASSIGNMENT, "the lease ran out")

    assert str(error) == (
        "the assignment of GPU server1:2 is no longer valid: the lease ran out; "
        "stop using the GPU and request one again"
    )
    assert error.assignment is ASSIGNMENT


@pytest.mark.parametrize(("is_temporary", "advice"), [(True, "try again"), (False, "fix the cause first")])
def test_a_failed_call_says_whether_to_try_again(is_temporary: bool, advice: str) -> None:
    error = EndpointError("server1", "it failed", status=503, is_temporary=is_temporary)

    assert str(error).startswith("endpoint server1: it failed (HTTP 503); ")
    assert str(error).endswith(advice)
    assert (error.endpoint_id, error.reason, error.status) == ("server1", "it failed", 503)
    assert error.is_temporary is is_temporary


def test_a_refusal_says_where_a_token_goes_if_that_is_what_is_missing() -> None:
    assert "set GPU_POOL_TOKEN" in str(RequestRefusedError({"box": "Without a token, only local calls may write."}))
    refused = str(RequestRefusedError({"box": "This can never be granted here: this box has 4 GPUs."}))
    assert "GPU_POOL_TOKEN" not in refused
    assert refused.count("this box has 4 GPUs") == 1
