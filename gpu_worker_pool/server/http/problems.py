"""Errors as `application/problem+json` (RFC 9457): the answer for each exception that ends a call."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus

from gpu_worker_pool.host.processes import ForeignProcess, NoSuchProcess
from gpu_worker_pool.ledger.driver import TooManyCalls
from gpu_worker_pool.ledger.journal import NotWritten
from gpu_worker_pool.server.authority.presence import TooManyWaiting
from gpu_worker_pool.server.encoding import encode
from gpu_worker_pool.wire.service import FollowersProblem, Problem

from .response import Response, as_headers

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
