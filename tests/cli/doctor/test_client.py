"""What `gpu-pool doctor` thinks of this machine as a client, from made-up facts and real answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpu_worker_pool.cli.doctor import client
from gpu_worker_pool.cli.doctor.client import EndpointFacts, endpoint_findings
from gpu_worker_pool.cli.pools.report import NOTHING
from gpu_worker_pool.cli.pools.servers import ServerAnswer, Servers
from gpu_worker_pool.urls import parse_endpoint
from tests.cli.doctor.facts import FACTS, FREE_GPU, pool
from tests.client.foreign_servers import (
    Behaviour,
    ForeignServer,
    Seen,
    answering,
    internal_error,
    not_found,
    saying,
    statistics,
)


@pytest.mark.parametrize(
    ("environ", "given", "status", "words"),
    [
        ({}, None, "ok", "default"),
        ({"GPU_SERVICE_ENDPOINT": "http://box"}, None, "ok", "by GPU_SERVICE_ENDPOINT"),
        ({"GPU_SERVICE_ENDPOINT": "http://box"}, ["http://x"], "ok", "by --endpoint"),
        (
            {"GPU_SERVICE_ENDPOINT": "http://box", "GPU_SERVICE_ENDPOINTS": "http://box"},
            None,
            "warning",
            "GPU_SERVICE_ENDPOINTS wins",
        ),
        (
            {"GPU_SERVICE_ENDPOINTS": "http://b", "GPU_STATS_SERVICE_ENDPOINTS": "http://a"},
            None,
            "warning",
            "GPU_STATS_SERVICE_ENDPOINTS wins",
        ),
        (
            {"GPU_STATS_SERVICE_ENDPOINTS": ",,"},
            None,
            "warning",
            "the default: http://box; GPU_STATS_SERVICE_ENDPOINTS=',,' names nothing and is ignored",
        ),
        (
            {"GPU_STATS_SERVICE_ENDPOINTS": ",,", "GPU_SERVICE_ENDPOINT": "http://box"},
            None,
            "warning",
            "by GPU_SERVICE_ENDPOINT: http://box; GPU_STATS_SERVICE_ENDPOINTS=',,' names nothing",
        ),
    ],
)
def test_which_variable_decides(environ: dict[str, str], given: list[str] | None, status: str, words: str) -> None:
    finding = client.judge_variables(environ, given, ["http://box"])

    assert finding.status == status
    assert words in finding.message


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        (FACTS, "ok", "1 GPU (nvml)"),
        (replace(FACTS, same_as="other"), "warning", "it is the same server as other"),
        (replace(FACTS, has_leases=False), "warning", "statistics only"),
        (replace(FACTS, pool=pool(can_grant=False, trouble="disk full")), "problem", "disk full"),
        (replace(FACTS, pool=pool(gpus=[])), "warning", "no GPU"),
        (replace(FACTS, took_s=2.0), "warning", "slow"),
        (replace(FACTS, pool=NOTHING, error="refused"), "problem", "refused"),
    ],
)
def test_what_an_endpoint_is_good_for(facts: EndpointFacts, status: str, words: str) -> None:
    finding = client.judge_reachable(facts, is_wanted=True)

    assert (finding.status, finding.endpoint) == (status, "box")
    assert words in finding.message


def test_a_server_with_two_addresses_is_found_out() -> None:
    first = replace(FACTS, pool=pool(server_id="x"))
    stranger = replace(FACTS, id="stranger", pool=pool(server_id="y"))
    older = [
        replace(FACTS, id="old"),
        replace(FACTS, id="older"),
        replace(FACTS, id="down", pool=NOTHING, error="refused"),
    ]

    found = client.mark_same([first, stranger, replace(first, id="again"), *older])

    assert [facts.same_as for facts in found] == [None, None, "box", None, None, None]


async def only_a_summary(seen: Seen) -> tuple[int, Any]:
    shown = {"gpus_summary": [{"gpu_id": 0}]}
    return (200, shown) if seen.path == "/gpu/summary" else (404, {"detail": "Not Found"})


@pytest.mark.parametrize(
    ("behaviour", "status", "words"),
    [
        (statistics(gpus=1), "warning", "1 GPU (source unknown), answers in"),
        (answering(only_a_summary), "warning", "it has statistics only"),
        (not_found, "problem", "its answer is not a GPU server's"),
        (internal_error, "problem", "status 500"),
        (saying(401, b'{"detail": "Log in first."}'), "problem", "Log in first (status 401)"),
    ],
)
def test_a_server_with_statistics_only_is_told_from_none(behaviour: Behaviour, status: str, words: str) -> None:
    with ForeignServer(behaviour) as foreign:
        (finding,) = endpoint_findings(Servers([foreign.url]), is_wanted=True)

    assert finding.status == status
    assert words in finding.message
    assert ("proxy that asks for a login" in str(finding.advice)) == ("401" in words)
    assert status == "problem" or "only the workers of one process are coordinated" in str(finding.advice)


def test_certificates_that_cannot_be_used_are_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_POOL_CA_FILE", "/nonexistent")

    (finding,) = endpoint_findings(Servers(["https://box"]), is_wanted=True)

    assert finding.status == "problem"
    assert "GPU_POOL_CA_FILE" in str(finding.advice)


def test_the_default_endpoint_need_not_be_there() -> None:
    finding = client.judge_reachable(replace(FACTS, pool=NOTHING, error="refused"), is_wanted=False)

    assert finding.status == "warning"
    assert "gpu-pool serve" in str(finding.advice)


@pytest.mark.parametrize(
    ("status", "has_token", "expected", "advice"),
    [
        (422, False, "ok", ""),
        (422, True, "ok", ""),
        (401, False, "problem", "set GPU_POOL_TOKEN"),
        (401, True, "problem", "unset GPU_POOL_TOKEN"),
        (503, True, "warning", "again"),
    ],
)
def test_whether_we_may_ask_is_known_by_a_call_that_changes_nothing(
    status: int, has_token: bool, expected: str, advice: str
) -> None:
    finding = client.judge_right(
        replace(FACTS, has_token=has_token, right=ServerAnswer("box", "", status, None, "why"))
    )

    assert finding is not None
    assert finding.status == expected
    assert advice in str(finding.advice)


@pytest.mark.parametrize(
    ("url", "has_token", "is_open"),
    [
        ("http://box:8000", True, True),
        ("http://10.0.0.7:8000", True, True),
        ("http://box:8000", False, False),
        ("https://box", True, False),
        ("http://localhost:8000", True, False),
        ("http://127.0.0.2:8000", True, False),
        ("http://[::1]:8000", True, False),
    ],
)
def test_a_token_over_a_network_without_tls_is_a_warning(url: str, has_token: bool, is_open: bool) -> None:
    finding = client.judge_open_token(replace(FACTS, url=parse_endpoint(url), has_token=has_token))

    assert (finding is not None and finding.status == "warning") == is_open


@pytest.mark.parametrize(("off_s", "status"), [(0.4, "ok"), (-4.0, "ok"), (60.0, "warning"), (-3600.0, "warning")])
def test_a_clock_that_is_off_is_a_warning(off_s: float, status: str) -> None:
    finding = client.judge_clock(replace(FACTS, clock_off_s=off_s))

    assert finding is not None
    assert finding.status == status
    assert client.judge_clock(FACTS) is None, "one that does not tell"


def test_thresholds_that_can_never_be_met() -> None:
    never = replace(FACTS, pool=pool(thresholds={"memory_percent": 0.0, "utilization_percent": 0.0}))

    assert client.judge_thresholds(FACTS, None, None) == []
    assert [finding.status for finding in client.judge_thresholds(never, None, None)] == ["problem", "problem"]
    assert len(client.judge_thresholds(never, 50.0, None)) == 1, "what the client asks for takes the server's place"
    assert [finding.status for finding in client.judge_own_thresholds(0.0, None)] == ["problem"]
    assert client.judge_own_thresholds(None, 10.0) == []


def test_a_gpu_that_somebody_outside_keeps_over_the_threshold_is_told_with_his_name() -> None:
    desktop = [{"pid": 17, "name": "Xorg", "used_mb": 850.0}, {"pid": 18, "name": None, "used_mb": None}]
    busy = {**FREE_GPU, "gpu_id": 3, "memory_outside_mb": 850, "processes": desktop}
    leased = {**busy, "leases": ["somebody"]}
    unknown = {**busy, "memory_outside_mb": None}

    (finding,) = client.judge_thresholds(replace(FACTS, pool=pool(gpus=[FREE_GPU, busy, leased, unknown])), None, None)

    assert finding.status == "warning"
    assert "GPU 3 of box" in finding.message
    assert "Xorg (pid 17, 850 MiB), an unknown program (pid 18)" in finding.message
    assert "/admin/ignored-processes/Xorg" in str(finding.advice)
    assert client.judge_thresholds(replace(FACTS, pool=pool(gpus=[busy])), 90.0, None) == []
