"""The GPUs that are kept for the first waiter that cannot be served."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from .gpu import GpuKey


class Basis(StrEnum):
    """What a date rests on; the surer comes first in the order of the words."""

    DECLARED = "declared"
    PREDICTED = "predicted"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Reservation:
    """The waiter can start at `date` on the pool's clock with these GPUs, by node and index, if the leases there end as
    they declared, or as is predicted. `after` is the lease that ends last. `seen` is when readings last bore it out.
    """

    lease_id: str
    gpus: tuple[GpuKey, ...]
    date: float
    basis: Basis
    after: str | None = None
    seen: float = field(default=0.0, compare=False)

    @property
    def nodes(self) -> set[str]:
        return {key.node for key in self.gpus}
