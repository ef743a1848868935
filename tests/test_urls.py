from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.urls import EndpointUrl, assign_ids, parse_endpoint, parse_endpoints, split_endpoints


def urls(value: str | list[str]) -> list[str]:
    return [endpoint.url for endpoint in parse_endpoints(value)]


def ids(value: str) -> list[str]:
    return list(assign_ids(parse_endpoints(value)))


# --- lists ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        "http://a:1,http://b:2",
        ",,http://a:1,, ,http://b:2\n",
        ["http://a:1", "http://b:2"],
        ["http://a:1,http://b:2", "", " "],
        "http://a:1,http://b:2,HTTP://A:1/",
    ],
)
def test_a_text_with_commas_and_a_list_are_the_same(value: str | list[str]) -> None:
    assert urls(value) == ["http://a:1", "http://b:2"]


@pytest.mark.parametrize("value", ["", " ", ",", " , ,", [], [""], ()])
def test_no_endpoint_at_all_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="there is no endpoint"):
        parse_endpoints(value)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("http://a", "http://a:80", True),
        ("https://a", "https://a:443/", True),
        ("http://a:08000", "http://a:8000", True),
        ("http://[::1]:80", "http://[0:0::1]", True),
        ("http://a", "https://a", False),
        ("http://a/x", "http://a/X", False),
    ],
)
def test_duplicates_are_one_place_however_written(one: str, other: str, is_same: bool) -> None:
    assert urls([one, other]) == [parse_endpoint(one).url] + ([] if is_same else [parse_endpoint(other).url])


# --- one URL -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("http://server1:8000", EndpointUrl("http://server1:8000", "server1", 8000, is_https=False)),
        ("HTTPS://Gpu.Company.COM/", EndpointUrl("https://gpu.company.com", "gpu.company.com", 443, is_https=True)),
        ("http://a:", EndpointUrl("http://a", "a", 80, is_https=False)),
        ("http://a/Pool/v1//", EndpointUrl("http://a/Pool/v1", "a", 80, is_https=False, path="/Pool/v1")),
        ("http://[::1]:8000/x", EndpointUrl("http://[::1]:8000/x", "::1", 8000, is_https=False, path="/x")),
        ("http://[FE80:0:0::1]", EndpointUrl("http://[fe80::1]", "fe80::1", 80, is_https=False)),
        ("http://München.de", EndpointUrl("http://münchen.de", "münchen.de", 80, is_https=False)),
        ("gpu-2:9000", EndpointUrl("http://gpu-2:9000", "gpu-2", 9000, is_https=False)),
        ("gpu-2", EndpointUrl("http://gpu-2:8000", "gpu-2", 8000, is_https=False)),
        ("[::1]", EndpointUrl("http://[::1]:8000", "::1", 8000, is_https=False)),
    ],
)
def test_a_url_is_normalised(text: str, parsed: EndpointUrl) -> None:
    assert parse_endpoint(text) == parsed
    assert str(parsed) == parsed.url


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("//localhost", "it has no host; write gpu-2:8000"),
        ("http:/localhost", "two slashes"),
        ("ftp://a", "'ftp://a' is not an endpoint URL: it must begin with http:// or https://"),
        ("http://", "the host is missing"),
        ("http://a:0", "'http://a:0' is not an endpoint URL: the port must be a whole number from 1 to 65535"),
        ("http://a:65536", "the port must be"),
        ("http://a:٨", "the port must be"),
        ("http://a:1:2", "brackets"),
        ("http://::1:8000", "brackets"),
        ("http://[]", "not an IPv6 address"),
        ("http://[fe80::1%25eth0]:1", "with a zone"),
        ("http://10.0.0", "not an IPv4 address"),
        ("http://8000", "not an IPv4 address"),
        ("http://-a", "not a valid name"),
        ("http://a..b", "not a valid name"),
        ("http://a!b", "not a valid name"),
        ("http://" + "a" * 64, "not a valid name"),
        ("http://a?", "a query"),
        ("http://a/#x", "a fragment"),
        ("http://a b", "commas between"),
        ("http:\\\\a", "characters that a URL cannot have"),
        ("http://a,http://b", "it has a comma"),
        ("http://a/" + "x" * 2048, "longer than 2048"),
    ],
)
def test_a_bad_url_is_named_with_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(ValueError, match="is not an endpoint URL: ") as caught:
        parse_endpoint(text)

    assert said in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "text",
    [
        "http://user:SECRET@host:8000",
        "user:SECRET@host:8000",
        "http://user:SEC@RET@host",
        "http://user:SECRET,SECRET@host:8000",
        "http://user:SECRET?SECRET@host",
        "http://user:SECRET",
        "http://host?token=SECRET",
        "http://us er:SECRET@host",
        "http://user:SECRET@" + "host" * 1000,
    ],
)
def test_no_secret_is_shown(text: str) -> None:
    for part in split_endpoints(text):
        with pytest.raises(ValueError, match="is not an endpoint URL: ") as caught:
            parse_endpoint(part)
        assert "SEC" not in str(caught.value)
        assert "RET" not in str(caught.value)


# Dots and digits alone would have to be an IPv4 address.
hosts = st.from_regex(
    r"[a-zA-Z]([a-zA-Z0-9_-]{0,8}[a-zA-Z0-9])?(\.[a-zA-Z]{1,5}){0,2}", fullmatch=True
) | st.ip_addresses(v=6).map(lambda address: f"[{address}]")
paths = st.sampled_from(["", "/", "/x", "/x/", "/y/z", "/x-y", "/x/y"])
ports = st.integers(1, 3) | st.integers(1, 65535)
texts = st.builds(
    lambda scheme, host, port, path: f"{scheme}://{host}{port}{path}",
    st.sampled_from(["http", "https", "HTTP"]),
    hosts | st.sampled_from(["a", "a-1", "a-1-x", "a-1-http", "a-1-x-y-http-2", "[::1]"]),
    ports.map(lambda port: f":{port}") | st.just(""),
    paths,
)


@given(texts)
def test_what_is_parsed_is_parsed_to_itself_and_as_others_read_it(text: str) -> None:
    endpoint = parse_endpoint(text)
    read = urlsplit(endpoint.url)

    assert parse_endpoint(endpoint.url) == endpoint
    assert (read.hostname, read.path, read.scheme == "https") == (endpoint.host, endpoint.path, endpoint.is_https)
    assert read.port in (endpoint.port, None)


# --- ids -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("http://server1:8000,http://server2:8000", ["server1", "server2"]),
        ("http://Gpu.Company.com", ["gpu.company.com"]),
        ("http://server1:8000,http://server1:8001,http://b", ["server1-8000", "server1-8001", "b"]),
        ("http://[::1]:8000,http://[fe80::1]", ["ip6-1", "ip6-fe80-1"]),
        ("http://[::]:1,http://ip6-1,http://[::1]", ["ip6", "ip6-1-80-http-2", "ip6-1-80-http-3"]),
        ("http://-ü.de", ["ü.de"]),
        ("http://proxy/gpu1,http://proxy/gpu2", ["proxy-80-gpu1", "proxy-80-gpu2"]),
        ("http://a:1,http://a:2,http://a-1", ["a-1-http", "a-2", "a-1"]),
        ("http://a/x-y,http://a/x/y,http://a/x.y", ["a-80-x-y-http-2", "a-80-x-y-http-3", "a-80-x.y"]),
    ],
)
def test_an_endpoint_goes_by_its_host_and_by_more_where_it_must(value: str, expected: list[str]) -> None:
    assert ids(value) == expected


@given(st.lists(texts, min_size=1, max_size=12))
def test_ids_are_unique_without_colons_and_in_order(written: list[str]) -> None:
    endpoints = parse_endpoints(written)
    named = assign_ids(endpoints)

    assert list(named.values()) == endpoints
    assert not any(":" in endpoint_id or endpoint_id.startswith("-") or not endpoint_id for endpoint_id in named)
