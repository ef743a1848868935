"""What an owner may use of a pool."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import check_number, check_whole
from .request import MAX_PRIORITY, MAX_TIME_LIMIT_S

# Stands for all owners without a quota of their own.
EVERYBODY_ELSE = "*"
MAX_WEIGHT = 1e6
MAX_QUOTA = 1_000_000


@dataclass(frozen=True, slots=True)
class Quota:
    """None: no limit.

    Up to `gpus` an owner is served before those who borrow. Above it an owner borrows, up to `ceiling`, and only with a
    time limit. Preemptible leases count for the ceiling alone. `weight` is the owner's part in a fair share.
    """

    gpus: int | None = None
    ceiling: int | None = None
    weight: float = 1.0
    max_priority: int | None = None
    max_time_limit_s: float | None = None
    max_queued: int | None = None

    def __post_init__(self) -> None:
        if self.gpus is not None:
            check_whole("gpus", self.gpus, 0, MAX_QUOTA)
        if self.ceiling is not None:
            check_whole("ceiling", self.ceiling, 0, MAX_QUOTA)
        if self.gpus is not None and self.ceiling is not None and self.ceiling < self.gpus:
            raise ValueError(
                f"ceiling is {self.ceiling} and gpus is {self.gpus}; the ceiling must not be the smaller one"
            )
        check_number("weight", self.weight, 0.001, MAX_WEIGHT)
        if self.max_priority is not None:
            check_whole("max_priority", self.max_priority, -MAX_PRIORITY, MAX_PRIORITY)
        if self.max_time_limit_s is not None:
            check_number("max_time_limit_s", self.max_time_limit_s, 1, MAX_TIME_LIMIT_S)
        if self.max_queued is not None:
            check_whole("max_queued", self.max_queued, 0, MAX_QUOTA)


NO_QUOTA = Quota()
