"""What happens in a client: one frozen object for hooks, the same as log records, and counts of its requests."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal, TypeVar

from gpu_worker_pool.models import LeaseEnding

logger = logging.getLogger("gpu_worker_pool.client")

EventKind = Literal["requested", "waiting", "assigned", "timed_out", "failed", "released", "lost", "ending", "going_on"]
# All others are for information: a request that fails raises its error.
_LEVELS: dict[str, int] = {"ending": logging.WARNING, "going_on": logging.WARNING, "lost": logging.ERROR}


@dataclass(frozen=True, slots=True)
class ClientEvent:
    """Something that happened to one worker's request or GPU. There are no secrets in it."""

    kind: EventKind
    worker_id: str
    lease_id: str
    endpoint: str | None = None
    gpu_id: int | str | None = None
    detail: str | None = None

    def __str__(self) -> str:
        parts = [f"{self.worker_id}: {self.kind}"]
        if self.gpu_id is not None:
            parts.append(f"GPU {self.gpu_id}")
        if self.endpoint is not None:
            parts.append(f"at {self.endpoint}")
        if self.detail:
            parts.append(f"({self.detail})")
        return " ".join(parts)


Hook = Callable[[ClientEvent], None]
_ToldT = TypeVar("_ToldT")


def call_hook(name: str, hook: Callable[[_ToldT], None] | None, about: _ToldT) -> None:
    """Call the user's code; no lease must suffer from it."""
    if hook is not None:
        try:
            hook(about)
        except Exception:  # the user's code may raise anything, and it is logged with its traceback
            logger.exception("%s failed", name)


def ending_text(ending: LeaseEnding | None) -> str:
    """The end that is announced; None: it was withdrawn."""
    if ending is None:
        return "the lease goes on: its end was withdrawn"
    from gpu_worker_pool.wire.leases import coming_end  # noqa: PLC0415 - few programs are told this

    return f"{coming_end(ending.reason, ending.ends_at)}; save your work"


def log_event(event: ClientEvent) -> None:
    """Log it as a record with the worker, the GPU, the endpoint and the lease as fields. Python writes a warning or an error to
    standard error where a program, or a notebook, has not set up its log.
    """
    level = _LEVELS.get(event.kind, logging.INFO)
    if logger.isEnabledFor(level):  # most programs do not log every request
        fields = {name: value for name, value in asdict(event).items() if name not in {"kind", "detail"}}
        logger.log(level, "%s", event, extra={**fields, "event": event.kind})


class Tally:
    """Counts of the requests of a client, by outcome."""

    def __init__(self) -> None:
        self.requests = 0
        self.granted = 0
        self.failed = 0
        self.by_endpoint: Counter[str] = Counter()
        # Requests that wait at present, and the last ones that have stopped waiting though a server may still list them.
        self.waiting: set[str] = set()
        self.done: deque[str] = deque(maxlen=1000)

    def end_wait(self, lease_id: str) -> None:
        """Note that a request does not wait any more."""
        self.waiting.discard(lease_id)
        self.done.append(lease_id)

    def count_grant(self, endpoint_id: str) -> None:
        """Count a request that was granted, and where."""
        self.granted += 1
        self.by_endpoint[endpoint_id] += 1

    @property
    def success_rate(self) -> float:
        """The successes in percent of the requests that are over; 100 where none is."""
        done = self.granted + self.failed
        return round(100.0 * self.granted / done, 2) if done else 100.0
