"""The errors of the pool. Each says what happened, who must act, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WAIT_LONGER = "wait longer (worker_timeout, or timeout= of the request) or ask for less"
START_SERVERS = "check that the GPU servers are running and that the endpoint URLs are right"


class PoolError(Exception):
    """The root of all errors of the pool."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception keeps only its message, but most errors here are made from facts. A worker process pickles its
        # errors for its parent.
        return type(self).__new__, (type(self),), {**self.__dict__, "args": self.args}


class WorkerTimeoutError(PoolError, TimeoutError):
    """No GPU was granted in the given time. `reason` says why: who holds them, or what is over a threshold."""

    def __init__(self, message: str | None = None, *, waited_s: float | None = None, reason: str | None = None) -> None:
        self.waited_s = waited_s
        self.reason = reason
        super().__init__(message or f"no GPU was granted {_within(waited_s)}{_because(reason)}; {WAIT_LONGER}")


class StaleAssignmentError(PoolError):
    """The holder has lost the assignment: the GPU may belong to another holder by now."""

    def __init__(self, assignment: object = None, reason: str | None = None) -> None:
        self.assignment = assignment
        self.reason = reason
        gpu_id = getattr(assignment, "gpu_id", None)
        what = "the assignment" if gpu_id is None else f"the assignment of GPU {gpu_id}"
        super().__init__(f"{what} is no longer valid{_because(reason)}; stop using the GPU and request one again")


class ServiceUnavailableError(PoolError):
    """No endpoint can be used at present. `reasons` says why, for each endpoint by its id."""

    def __init__(self, reasons: Mapping[str, str] | None = None) -> None:
        self.reasons = dict(reasons or {})
        super().__init__(f"no GPU server is available{_because(_listed(self.reasons))}; {START_SERVERS}")


class NoEndpointAnsweredError(ServiceUnavailableError, WorkerTimeoutError):
    """The time is over and no endpoint could be reached: waiting longer will not help."""

    def __init__(self, reasons: Mapping[str, str] | None = None, *, waited_s: float | None = None) -> None:
        self.reasons = dict(reasons or {})
        listed = _listed(self.reasons)
        message = f"no GPU server answered {_within(waited_s)}{_because(listed)}; {START_SERVERS}"
        WorkerTimeoutError.__init__(self, message, waited_s=waited_s, reason=listed)


class RequestRefusedError(PoolError, ValueError):
    """No endpoint could ever serve the request, or none lets this caller in. `reasons` are by endpoint id.

    `has_granted`: an endpoint granted something else instead, which was released. `was_ended`: it was in a queue, and another
    caller took it out, so it may be requested again.
    """

    def __init__(
        self, reasons: Mapping[str, str] | None = None, *, has_granted: bool = False, was_ended: bool = False
    ) -> None:
        self.reasons = dict(reasons or {})
        self.was_ended = was_ended
        if was_ended and not has_granted:
            again = "request again once that is settled"
            super().__init__(f"the request was ended while it waited{_because(_listed(self.reasons))}; {again}")
            return
        what, advice = "the request was refused", ""
        if has_granted:
            what = "the request cannot be served"
            advice = "; the lease was released: check which program answers at that address"
        elif any("token" in reason.lower() for reason in self.reasons.values()):
            # A server that asks for proof names its own tokens; the caller needs to know where theirs goes.
            advice = "; set GPU_POOL_TOKEN (or token=) to a token of that server"
        super().__init__(f"{what}{_because(_listed(self.reasons))}{advice}")


class EndpointError(PoolError):
    """One endpoint failed one call. `status` is that of its HTTP answer, None if there was none."""

    def __init__(self, endpoint_id: str, reason: str, *, status: int | None = None, is_temporary: bool) -> None:
        self.endpoint_id = endpoint_id
        self.reason = reason
        self.status = status
        self.is_temporary = is_temporary
        answer = "" if status is None else f" (HTTP {status})"
        advice = (
            "this may be temporary, try again" if is_temporary else "trying again will not help, fix the cause first"
        )
        super().__init__(f"endpoint {endpoint_id}: {reason}{answer}; {advice}")


def _within(waited_s: float | None) -> str:
    return "in time" if waited_s is None else f"within {waited_s:g} s"


def _because(reason: str | None) -> str:
    return f": {reason.rstrip('. ')}" if reason else ""


def _listed(reasons: Mapping[str, str]) -> str | None:
    said = (f"{endpoint_id}: {reason.rstrip('. ')}" for endpoint_id, reason in reasons.items())
    return "; ".join(said) or None
