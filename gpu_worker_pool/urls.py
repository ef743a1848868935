"""The URLs of endpoints, and the short ids of endpoints."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

MAX_URL = 2048
MAX_SHOWN = 120
DEFAULT_PORTS = {"http": 80, "https": 443}
# What a server listens on, unless it is told otherwise.
SERVER_PORT = 8000

# Not at a comma in a password: each half would look like a URL of its own, and be shown.
_COMMA = re.compile(r",(?![^/]*@)")
_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<netloc>[^/]*)(?P<path>.*)", re.IGNORECASE)
_NETLOC = re.compile(r"(?P<host>\[[^\]]*\]|[^:\[\]]*)(?::(?P<port>.*))?")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
# What no URL here may have; the first that is found is told.
_FAULTS = {
    re.compile("@"): "it has a user name or password, or an @; a secret in a URL ends up in logs, "
    "give the token by GPU_POOL_TOKEN or token= instead",
    re.compile(r"[?#]"): "it has a query (?) or a fragment (#); leave that out",
    re.compile(","): "it has a comma; give one URL here",
    re.compile(r"""[\s\\<>"{}|^`\x00-\x1f\x7f-\x9f]"""): "it has blanks or other characters that a URL cannot have; "
    "several URLs need commas between them",
}


@dataclass(frozen=True)
class EndpointUrl:
    """The URL of an endpoint. `url` has no trailing slash; `port` is the scheme's default if none was given."""

    url: str
    host: str
    port: int
    is_https: bool
    path: str = ""

    @property
    def identity(self) -> tuple[bool, str, int, str]:
        """Equal for two spellings of one URL, with and without the scheme's default port."""
        return self.is_https, self.host, self.port, self.path

    def __str__(self) -> str:
        return self.url


def parse_endpoints(value: str | Sequence[str]) -> list[EndpointUrl]:
    """Parse a text with commas, or a list of such texts; duplicates are dropped, the order is kept.

    A ValueError names the bad URL and what is wrong with it, or says that there is no URL.
    """
    endpoints = unique_endpoints(parse_endpoint(part) for part in split_endpoints(value))
    if not endpoints:
        raise ValueError("there is no endpoint in it; write at least one URL, such as http://localhost:8000")
    return endpoints


def split_endpoints(value: str | Sequence[str]) -> list[str]:
    """Split a text with commas, or a list of such texts, into URLs, unchecked; empty ones are left out."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError("it must be a text of URLs with commas between them, or a list of URLs")
    return [part.strip() for text in texts for part in _COMMA.split(text) if part.strip()]


def unique_endpoints(endpoints: Iterable[EndpointUrl]) -> list[EndpointUrl]:
    """Drop duplicates; the first spelling is kept."""
    first: dict[tuple[bool, str, int, str], EndpointUrl] = {}
    for endpoint in endpoints:
        first.setdefault(endpoint.identity, endpoint)
    return list(first.values())


def parse_endpoint(text: str) -> EndpointUrl:
    """Parse one URL; a ValueError says what is wrong with it, and shows no part that may be a secret."""
    if len(text) > MAX_URL:
        raise _bad(text, f"it is longer than {MAX_URL} characters")
    for pattern, fault in _FAULTS.items():
        if pattern.search(text):
            raise _bad(text, fault)
    match = _URL.fullmatch(text)
    if match is None:
        if re.match(r"https?:/", text, re.IGNORECASE):
            raise _bad(text, "write http:// with two slashes")
        if text.startswith("/"):
            raise _bad(text, "it has no host; write gpu-2:8000, or http://gpu-2:8000")
        return _parse_short(text)
    scheme = match["scheme"].lower()
    if scheme not in DEFAULT_PORTS:
        raise _bad(text, "it must begin with http:// or https://")
    netloc = _NETLOC.fullmatch(match["netloc"])
    if netloc is None:
        raise _bad(text, "the host cannot be read; an IPv6 address must be in brackets, as in http://[::1]:8000")
    port = _port(text, netloc["port"])
    host = _host(text, netloc["host"].lower())
    path = match["path"].rstrip("/")
    written = f"[{host}]" if ":" in host else host
    if port is not None:
        written += f":{port}"
    return EndpointUrl(
        url=f"{scheme}://{written}{path}",
        host=host,
        port=DEFAULT_PORTS[scheme] if port is None else port,
        is_https=scheme == "https",
        path=path,
    )


def _parse_short(text: str) -> EndpointUrl:
    """A server without a scheme, as people say it: `gpu-2:8000`, or `gpu-2` for the port that servers have by default."""
    netloc, slash, path = text.partition("/")
    has_port = ":" in netloc.rpartition("]")[2]
    return parse_endpoint(f"http://{netloc}{'' if has_port else f':{SERVER_PORT}'}{slash}{path}")


def assign_ids(endpoints: Iterable[EndpointUrl]) -> dict[str, EndpointUrl]:
    """Give each endpoint a unique id: its host if no other endpoint has it, else host-port, else more of the URL.

    An id has no colon, so that `server1:2` can be split, and does not begin with a dash, so that no command takes it
    for an option. The order is kept. The id of an IPv6 address such as fe80::1 is ip6-fe80-1.
    """
    endpoints = list(endpoints)
    spellings = [_spellings(endpoint) for endpoint in endpoints]
    names: dict[int, str] = {}
    # The shortest id first; an endpoint with a host of its own comes before those that need more.
    for spelled in zip(*spellings, strict=True):
        left = {position: name for position, name in enumerate(spelled) if position not in names}
        wanted = Counter(left.values())
        taken = set(names.values())
        names |= {position: name for position, name in left.items() if wanted[name] == 1 and name not in taken}
    for position, (*_, longest) in enumerate(spellings):
        if position not in names:
            taken = set(names.values())
            numbered = (f"{longest}-{number}" for number in count(2))
            names[position] = next(name for name in numbered if name not in taken)
    return {names[position]: endpoint for position, endpoint in enumerate(endpoints)}


def _port(text: str, digits: str | None) -> int | None:
    if not digits:
        return None
    if not re.fullmatch(r"[0-9]{1,5}", digits) or not 1 <= int(digits) <= 65535:
        raise _bad(text, "the port must be a whole number from 1 to 65535; an IPv6 address must be in brackets")
    return int(digits)


def _host(text: str, host: str) -> str:
    if not host:
        raise _bad(text, "the host is missing")
    is_ipv6 = host.startswith("[")
    if is_ipv6 and "%" in host:
        raise _bad(text, "an IPv6 address with a zone (%) is not supported; use another address or a name")
    try:
        if is_ipv6 or host.removesuffix(".").rpartition(".")[2].isdecimal():
            import ipaddress  # noqa: PLC0415 - it takes longer to load than all the rest of this file, and few hosts need it

            return ipaddress.IPv6Address(host[1:-1]).compressed if is_ipv6 else str(ipaddress.IPv4Address(host))
    except ValueError:
        ipv4_fault = "the host ends in a number but is not an IPv4 address, such as 192.168.0.7"
        raise _bad(text, "the text in brackets is not an IPv6 address" if is_ipv6 else ipv4_fault) from None
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in _ascii_labels(host)):
        raise _bad(text, "the host is not a valid name; it must be letters, digits and hyphens, with dots between them")
    return host


def _ascii_labels(host: str) -> list[str]:
    """The labels of a name as they are resolved. For checks only: the resolver's rules for other scripts may be newer."""
    name = host.removesuffix(".")
    try:
        return (name if name.isascii() else name.encode("idna").decode("ascii")).split(".")
    except UnicodeError:
        return [""]


def _bad(text: str, fault: str) -> ValueError:
    return ValueError(f"{_shown(text)!r} is not an endpoint URL: {fault}")


def _shown(text: str) -> str:
    """The URL for an error message, without parts that may be secret: user and password, query, a port in letters."""
    has_secret_end = re.search(r"[?#]", text) is not None
    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text)
    start = scheme[0] if scheme else ""
    if "@" in text:
        after = text.rpartition("@")[2]
        return start + ("***" if has_secret_end else f"***@{after}")[:MAX_SHOWN]
    rest = re.split(r"[?#]", text.removeprefix(start))[0]
    # A password with an @ may have been cut off before it.
    rest = re.sub(r"^([^/\[:]*):(?![0-9a-f:.]*(/|$)).*", r"\1:***", rest)
    shown = start + rest + ("?***" if has_secret_end else "")
    return shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "..."


def _spellings(endpoint: EndpointUrl) -> tuple[str, str, str, str]:
    """What the endpoint may be called, from the shortest to the longest."""
    # A name in another script may begin with a dash, because it is resolved as xn--...
    host = endpoint.host.lstrip("-")
    if ":" in host:
        host = "-".join(("ip6", *filter(None, host.split(":"))))
    with_port = f"{host}-{endpoint.port}"
    path = re.sub(r"[^\w.-]+", "-", endpoint.path).strip("-")
    with_path = f"{with_port}-{path}" if path else with_port
    return host, with_port, with_path, f"{with_path}-{'https' if endpoint.is_https else 'http'}"
