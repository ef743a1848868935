from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from gpu_worker_pool.config import ClientConfig

TWO = "http://server1:8000,http://server2:8000"
STATS, PLURAL, SINGULAR = "GPU_STATS_SERVICE_ENDPOINTS", "GPU_SERVICE_ENDPOINTS", "GPU_SERVICE_ENDPOINT"


def build(environ: dict[str, str] | None = None, **given: Any) -> ClientConfig:
    return ClientConfig.build(environ=environ or {}, **given)


def urls(config: ClientConfig) -> list[str]:
    return [endpoint.url for endpoint in config.endpoints.values()]


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


# --- endpoints and mode --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "given", "hosts", "is_multi"),
    [
        ({}, {}, "localhost", False),
        ({SINGULAR: "http://a"}, {}, "a", False),
        ({STATS: "http://a"}, {}, "a", False),
        ({PLURAL: "http://a"}, {}, "a", False),
        ({STATS: "http://a,http://b"}, {}, "a b", True),
        ({PLURAL: "http://a,http://b"}, {}, "a b", True),
        ({STATS: "http://a,http://a:80/"}, {}, "a", False),
        ({STATS: "http://a", PLURAL: "http://b,http://c", SINGULAR: "http://d"}, {}, "a", False),
        ({PLURAL: "http://b,http://c", SINGULAR: "http://d"}, {}, "b c", True),
        ({STATS: "", PLURAL: " , ", SINGULAR: "http://d"}, {}, "d", False),
        ({STATS: " "}, {}, "localhost", False),
        ({SINGULAR: " http://a, "}, {}, "a", False),
        ({}, {"service_endpoint": "http://a"}, "a", False),
        ({}, {"service_endpoints": "http://a"}, "a", True),
        ({}, {"service_endpoints": "http://a,http://b"}, "a b", True),
        ({}, {"service_endpoints": ["http://a", "http://b"]}, "a b", True),
        ({}, {"service_endpoints": "http://a", "service_endpoint": "no URL"}, "a", True),
        ({STATS: "http://a,http://b"}, {"service_endpoint": "http://c"}, "c", False),
        ({STATS: "http://a,http://b"}, {"service_endpoints": "http://c"}, "c", True),
        ({STATS: "no URL"}, {"service_endpoint": "http://c"}, "c", False),
    ],
)
def test_where_endpoints_come_from_and_which_mode_that_is(
    environ: dict[str, str], given: dict[str, Any], hosts: str, is_multi: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = build(environ, **given)

    assert list(config.endpoints) == hosts.split()
    assert config.is_multi is is_multi
    assert errors(caplog) == []


def test_the_default_is_the_server_s_own() -> None:
    assert urls(build()) == ["http://localhost:8000"]


@pytest.mark.parametrize(
    ("environ", "shown", "is_multi", "said"),
    [
        ({STATS: "http://a:1,b!"}, ["http://a:1"], True, ["b!", "left out"]),
        ({STATS: "b!"}, ["http://localhost:8000"], False, ["b!", "using the default http://localhost:8000"]),
        ({STATS: "b!", SINGULAR: "http://c"}, ["http://localhost:8000"], False, ["b!", "using the default"]),
        ({STATS: "b!,c!"}, ["http://localhost:8000"], True, ["b!", "c!", "using the default"]),
        ({SINGULAR: "b!"}, ["http://localhost:8000"], False, ["b!", "using the default"]),
        ({SINGULAR: TWO}, ["http://localhost:8000"], False, ["several URLs, which belong in " + STATS]),
    ],
)
def test_a_bad_url_in_the_environment_is_logged_and_left_out(
    environ: dict[str, str], shown: list[str], is_multi: bool, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = build(environ)

    assert urls(config) == shown
    assert config.is_multi is is_multi
    logged = "\n".join(errors(caplog))
    assert next(iter(environ)) in logged
    for words in said:
        assert words in logged


def test_a_secret_in_a_url_of_the_environment_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    build({STATS: "http://user:SECRET,SECRET@a:1,http://b?key=SECRET,http://c"})

    assert len(errors(caplog)) == 2
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"service_endpoint": "a!"}, "service_endpoint: .*a!.* is not an endpoint URL"),
        ({"service_endpoint": ""}, "service_endpoint: there is no endpoint"),
        ({"service_endpoint": TWO}, "service_endpoint: .* give them as service_endpoints"),
        ({"service_endpoint": 7}, "service_endpoint: it must be a text"),
        ({"service_endpoint": 0}, "service_endpoint: it must be a text"),
        ({"service_endpoints": "http://a,b!"}, "service_endpoints: .*b!.* is not an endpoint URL"),
        ({"service_endpoints": ""}, "service_endpoints: there is no endpoint"),
        ({"service_endpoints": []}, "service_endpoints: there is no endpoint"),
        ({"service_endpoints": [7]}, "service_endpoints: it must be a text"),
    ],
)
def test_a_bad_url_in_the_constructor_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        build({STATS: "http://good"}, **given)


# --- numbers -------------------------------------------------------------------------------------------------------

# parameter, variable, default, least, most, a good one
NUMBERS = [
    ("memory_threshold", "GPU_MEMORY_THRESHOLD_PERCENT", 80.0, 0, 100, 70.5),
    ("utilization_threshold", "GPU_UTILIZATION_THRESHOLD_PERCENT", 90.0, 0, 100, 70.5),
    ("polling_interval", "GPU_POLLING_INTERVAL", 5.0, 0.05, 3600, 3),
    ("endpoint_timeout", "GPU_ENDPOINT_TIMEOUT", 10.0, 0.01, 3600, 15.0),
    ("endpoint_max_retries", "GPU_ENDPOINT_MAX_RETRIES", 3, 0, 100, 5),
    ("endpoint_health_check_interval", "GPU_ENDPOINT_HEALTH_CHECK_INTERVAL", 30.0, 0.05, 86400, 60),
    ("worker_timeout", None, 300.0, 0, 1e9, 600.0),
    ("request_timeout", None, 30.0, 0.01, 3600, 10),
    ("ttl_s", "GPU_POOL_TTL", 60.0, 0.1, 604800, 12.5),
]
IN_CONSTRUCTOR = [row for row in NUMBERS if row[0] != "ttl_s"]
IN_ENVIRONMENT = [row for row in NUMBERS if row[1]]
NAMES = "name variable default low high good".split()  # noqa: SIM905


@pytest.mark.parametrize(NAMES, IN_CONSTRUCTOR)
def test_the_constructor_wins(
    name: str,
    variable: str | None,
    default: float,
    low: float,
    high: float,
    good: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for environ in ({}, {variable: "nonsense"}, {variable: str(high)}) if variable else ({},):
        for value in (good, low, high):
            found = getattr(build(environ, **{name: value}), name)
            assert found == value
            assert type(found) is type(default)
    assert errors(caplog) == []


@pytest.mark.parametrize(NAMES, IN_CONSTRUCTOR)
def test_a_bad_number_in_the_constructor_is_refused_by_name_value_and_range(
    name: str, variable: str, default: float, low: float, high: float, good: float
) -> None:
    bad: list[Any] = [low - 1, high * 2, math.nan, math.inf, -math.inf, str(good), True, [], 10**400]
    for value in bad:
        with pytest.raises(ValueError, match="must be") as caught:
            build(**{name: value})
        assert str(caught.value).startswith(f"{name} is {value!r}; it must be a ")
        assert str(caught.value).endswith(f"from {low:.15g} to {high:.15g}")


@pytest.mark.parametrize(NAMES, IN_ENVIRONMENT)
def test_the_environment_is_read(
    name: str, variable: str, default: float, low: float, high: float, good: float, caplog: pytest.LogCaptureFixture
) -> None:
    for value in (good, low, high):
        found = getattr(build({variable: f" {value} "}), name)
        assert found == value
        assert type(found) is type(default)
    assert errors(caplog) == []


@pytest.mark.parametrize(NAMES, IN_ENVIRONMENT)
@pytest.mark.parametrize("text", ["nonsense", "nan", "inf", "-1", "1e99", "5 s", "9" * 5000])
def test_a_bad_number_in_the_environment_is_logged_and_the_default_used(
    name: str,
    variable: str,
    default: float,
    low: float,
    high: float,
    good: float,
    text: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert getattr(build({variable: text}), name) == default
    (logged,) = errors(caplog)
    assert logged.startswith(f"{variable} is ")
    assert f"from {low:g} to {high:g}; using the default {default:g}" in logged


@pytest.mark.parametrize(
    ("environ", "given", "asked"),
    [
        ({}, {}, (None, None)),
        ({}, {"memory_threshold": 80}, (80.0, None)),
        ({"GPU_UTILIZATION_THRESHOLD_PERCENT": "90"}, {}, (None, 90.0)),
        ({"GPU_MEMORY_THRESHOLD_PERCENT": "nonsense"}, {}, (None, None)),
        ({"GPU_MEMORY_THRESHOLD_PERCENT": "0"}, {"utilization_threshold": 0}, (0.0, 0.0)),
    ],
)
def test_a_threshold_that_was_asked_for_is_told_from_the_default(
    environ: dict[str, str], given: dict[str, Any], asked: tuple[float | None, float | None]
) -> None:
    config = build(environ, **given)

    assert (config.asked_memory_threshold, config.asked_utilization_threshold) == asked
    assert config.memory_threshold == (80.0 if asked[0] is None else asked[0])
    assert config.utilization_threshold == (90.0 if asked[1] is None else asked[1])


# --- the strategy --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "given", "strategy"),
    [
        ("", None, "availability"),
        ("weighted", None, "weighted"),
        (" Round_Robin ", None, "round_robin"),
        ("weighted", "round_robin", "round_robin"),
        ("nonsense", "round_robin", "round_robin"),
    ],
)
def test_a_strategy_is_chosen(text: str, given: str | None, strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    assert build({"GPU_LOAD_BALANCING_STRATEGY": text}, load_balancing_strategy=given).strategy == strategy
    assert errors(caplog) == []


def test_an_unknown_strategy_is_logged_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    assert build({"GPU_LOAD_BALANCING_STRATEGY": "fastest"}).strategy == "availability"
    (logged,) = errors(caplog)
    assert logged == (
        "GPU_LOAD_BALANCING_STRATEGY is 'fastest'; it must be one of availability, round_robin, weighted; "
        "using the default 'availability'"
    )
    for bad in ("fastest", "", 7, ["weighted"]):
        with pytest.raises(
            ValueError, match=r"^load_balancing_strategy is .*; it must be one of availability, round_robin"
        ):
            build(load_balancing_strategy=bad)


# --- tokens and the rest -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "text", "expected"),
    [
        (None, "", {}),
        (None, " SECRET-1\n", {"server1": "SECRET-1", "server2": "SECRET-1"}),
        ("SECRET-2", "SECRET-1", {"server1": "SECRET-2", "server2": "SECRET-2"}),
        (" SECRET-2\n", "", {"server1": "SECRET-2", "server2": "SECRET-2"}),
        ({}, "SECRET-1", {}),
        ({"server1": "SECRET-2"}, "SECRET-1", {"server1": "SECRET-2"}),
        ({"HTTP://Server2:8000/": "SECRET-2"}, "", {"server2": "SECRET-2"}),
        (
            {"http://server1:8000": "SECRET-1", "server2": "SECRET-2"},
            "",
            {"server1": "SECRET-1", "server2": "SECRET-2"},
        ),
        ({"http://server1:8000": "SECRET-1", "server1": "SECRET-1"}, "", {"server1": "SECRET-1"}),
    ],
)
def test_tokens_are_by_endpoint_and_never_shown(token: Any, text: str, expected: dict[str, str]) -> None:
    config = build({"GPU_POOL_TOKEN": text}, service_endpoints=TWO, token=token)

    assert config.tokens == expected
    assert "SECRET" not in repr(config)


@pytest.mark.parametrize(
    ("token", "said"),
    [
        ("", "^token is not usable"),
        (" ", "^token is not usable"),
        ("SECRET two", "^token is not usable"),
        ("SECRETü", "^token is not usable"),
        ("SECRET\r\nX-Evil: 1", "^token is not usable"),
        (7, "^token is not usable"),
        (["SECRET"], "^token is not usable"),
        ({"server1": ""}, "^token: entry 1 is not usable"),
        ({"server1": None}, "^token: entry 1 is not usable"),
        (
            {"server1": "x", "SECRET": "http://server2:8000"},
            "^token: entry 2 names no known endpoint.*server1 .http://",
        ),
        ({"http://server1:8001": "SECRET"}, "^token: entry 1 names no known endpoint"),
        ({7: "SECRET"}, "^token: entry 1 names no known endpoint"),
        ({"server1": "SECRET", "http://server1:8000": "SECRET2"}, "^token: server1 has two different ones"),
    ],
)
def test_a_bad_token_in_the_constructor_is_refused_without_showing_it(token: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        build({"GPU_POOL_TOKEN": "good"}, service_endpoints=TWO, token=token)

    assert "SECRET" not in str(caught.value)


def test_a_bad_token_in_the_environment_is_logged_without_showing_it(caplog: pytest.LogCaptureFixture) -> None:
    assert build({"GPU_POOL_TOKEN": "SECRET two"}).tokens == {}
    (logged,) = errors(caplog)
    assert logged.startswith("GPU_POOL_TOKEN is not usable")
    assert "SECRET" not in caplog.text
