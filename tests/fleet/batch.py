"""What a simulated leader writes at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import Lease

# None: not now, ask another candidate.
Answer = Callable[[list[ev.Event] | None, Lease | None], None]


@dataclass
class Batch:
    """Events that are written together, and the callers that wait for that."""

    id: str
    events: list[ev.DurableEvent] = field(default_factory=list)
    callers: list[tuple[list[ev.Event], str, Answer]] = field(default_factory=list)
    # The events of the steps, the volatile ones too, that the boxes hear of once this is written.
    told: list[ev.Event] = field(default_factory=list)
    opens: bool = False
