"""What happens in a client: one frozen object for hooks, and the same as log records."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

logger = logging.getLogger("gpu_worker_pool.client")

EventKind = Literal["requested", "waiting", "assigned", "timed_out", "failed", "released", "lost"]
_LEVELS: dict[str, int] = {"timed_out": logging.WARNING, "failed": logging.WARNING, "lost": logging.ERROR}


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


def log_event(event: ClientEvent) -> None:
    """Log it as a record with the worker, the GPU, the endpoint and the lease as fields."""
    fields = {name: value for name, value in asdict(event).items() if name not in {"kind", "detail"}}
    logger.log(_LEVELS.get(event.kind, logging.INFO), "%s", event, extra={**fields, "event": event.kind})


def say_in_notebook(sentence: str) -> None:
    """Print to the notebook's standard error if IPython runs this process: nobody reads a log there."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        print(sentence, file=sys.stderr, flush=True)  # noqa: T201 - what it is for
