"""What happens in a client: one frozen object for hooks, the same as log records, and counts of its requests."""

from __future__ import annotations

import logging
import sys
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
    """Call the user's code. It may raise anything, and no lease must suffer from it."""
    if hook is not None:
        try:
            hook(about)
        except Exception:
            logger.exception("%s failed", name)


def ending_text(ending: LeaseEnding | None) -> str:
    """The end that is announced; None: it was withdrawn."""
    if ending is None:
        return "the lease goes on: its end was withdrawn"
    from gpu_worker_pool.wire.endings import coming_end  # noqa: PLC0415 - few programs are told this

    return f"{coming_end(ending.reason, ending.ends_at)}; save your work"


def log_event(event: ClientEvent) -> None:
    """Log it as a record with the worker, the GPU, the endpoint and the lease as fields.

    A loss, and what comes before it, is said to the user of a notebook too, who reads no log; once, if the notebook
    shows the log.
    """
    if event.kind in {"lost", "ending", "going_on"} and _is_in_notebook() and not _is_log_shown():
        said = f"GPU {event.gpu_id}: {event.detail}."
        if event.kind == "lost":
            said = f"GPU {event.gpu_id} is no longer yours: {event.detail}. Stop using it, and request one again."
        print(said, file=sys.stderr, flush=True)  # noqa: T201 - what it is for
        if not logger.hasHandlers():
            return  # logging would write it to the same place
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


def _is_in_notebook() -> bool:
    from .command_label import ipython_shell  # noqa: PLC0415 - the same

    return ipython_shell() is not None


def _is_log_shown() -> bool:
    """Whether errors of this log are written to this program's standard output or standard error."""
    source: logging.Logger | None = logger if logger.isEnabledFor(logging.ERROR) else None
    while source is not None:
        for handler in source.handlers:
            if handler.level <= logging.ERROR and getattr(handler, "stream", None) in {sys.stdout, sys.stderr}:
                return True
        source = source.parent if source.propagate else None
    return False
