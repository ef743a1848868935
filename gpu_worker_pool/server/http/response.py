"""The answer to a call, what its caller accepts, and errors as `application/problem+json` (RFC 9457): the answer for each exception
that ends a call.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, Mapping
from http import HTTPStatus
from typing import NamedTuple

from gpu_worker_pool.host.processes import ForeignProcess, NoSuchProcess
from gpu_worker_pool.ledger.driver import TooManyCalls
from gpu_worker_pool.ledger.journal import NotWritten
from gpu_worker_pool.server.authority.presence import TooManyWaiting
from gpu_worker_pool.server.encoding import encode
from gpu_worker_pool.wire.service import FollowersProblem, Problem

Headers = tuple[tuple[bytes, bytes], ...]
JSON: Headers = ((b"content-type", b"application/json"),)


class Response(NamedTuple):
    """Status, body and headers, without the length. A generator is streamed until the caller disconnects."""

    status: int
    body: bytes | AsyncGenerator[bytes, None]
    headers: Headers = JSON


def as_headers(headers: Mapping[str, str]) -> Headers:
    return tuple((name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items())


def redirect(location: str, *headers: tuple[bytes, bytes]) -> Response:
    """Redirect to an address relative to this one: the Host header is the caller's, and a proxy may use other addresses."""
    return Response(307, b"", (*headers, (b"location", location.encode("latin-1"))))


def secure_headers(policy: str) -> Headers:
    """The headers of a page for people: what it may load, and that no other site may embed or read it."""
    return (
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"x-frame-options", b"DENY"),
        (b"cross-origin-opener-policy", b"same-origin"),
        (b"cross-origin-resource-policy", b"same-origin"),
    )


_QUALITY = re.compile(r"\s*q\s*=\s*(0(?:\.\d{0,3})?|1(?:\.0{0,3})?)\s*", re.IGNORECASE)


def wants_page(accept: str | None) -> bool:
    """Whether this Accept header prefers a page to JSON. A caller that names no page gets JSON."""
    ranges: dict[str, float] = {}
    for part in (accept or "").split(","):
        kind, _, parameters = part.partition(";")
        ranges[kind.strip().lower()] = _quality(parameters)
    page = ranges.get("text/html", 0.0)
    json = next((ranges[kind] for kind in ("application/json", "application/*", "*/*") if kind in ranges), 0.0)
    return page > 0 and page >= json


def takes_gzip(accept_encoding: str | None) -> bool:
    for part in (accept_encoding or "").split(","):
        coding, _, parameters = part.partition(";")
        if coding.strip().lower() == "gzip":
            return _quality(parameters) > 0
    return False


def _quality(parameters: str) -> float:
    """The parameter q; 1 if it is missing or invalid."""
    for parameter in parameters.split(";"):
        found = _QUALITY.fullmatch(parameter)
        if found is not None:
            return float(found[1])
    return 1.0


logger = logging.getLogger(__name__)

PROBLEM = (b"content-type", b"application/problem+json")
RETRY_AFTER = {"Retry-After": "1"}
# The rest of the request is not read, so the connection cannot be used again.
CLOSE = {"Connection": "close"}


class Refusal(Exception):  # noqa: N818 - an answer, not a mistake
    """A call that is answered with a problem. The detail says what to do."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers or {}


class RefusedByFollower(Refusal):
    """A call that only the leader of the fleet can answer; `leader` is its URL."""

    def __init__(self, detail: str, leader: str) -> None:
        super().__init__(503, detail, RETRY_AFTER)
        self.leader = leader


def problem_of(error: Exception) -> Response:
    refused = _refusal(error)
    title = HTTPStatus(refused.status).phrase
    problem = Problem(title=title, status=refused.status, detail=refused.detail)
    if isinstance(refused, RefusedByFollower):
        problem = FollowersProblem(title=title, status=refused.status, detail=refused.detail, leader=refused.leader)
    body = encode(problem)
    return Response(refused.status, body, (*as_headers(refused.headers), PROBLEM))


def _refusal(error: Exception) -> Refusal:
    match error:
        case Refusal():
            return error
        case NoSuchProcess():
            return Refusal(422, f"{error}.")
        case TooManyCalls():
            return Refusal(429, str(error), RETRY_AFTER)
        case ForeignProcess():
            return Refusal(403, f"{error}.")
        case TooManyWaiting():
            return Refusal(503, str(error), RETRY_AFTER)
        case NotWritten(leader_url=str(url)):
            return RefusedByFollower(f"Nothing can be granted or ended here: {str(error).rstrip('.')}.", url)
        case NotWritten():
            detail = f"Nothing can be granted or ended now: {str(error).rstrip('.')}."
            if error.is_temporary:
                detail += (
                    " Your request may have been recorded: repeat it with the same id, which is harmless. "
                    "A lease that is not requested again ends."
                )
            return Refusal(503, detail, RETRY_AFTER)
    logger.error("a call failed", exc_info=error)
    return Refusal(500, "The server failed on this request; its log says why.")
