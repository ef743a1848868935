"""How long to wait before trying again."""

import math
from dataclasses import dataclass

SHORTEST_FIRST_S = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Delays that grow exponentially from `first_s` to `max_s`, each half fixed and half random.

    The fixed half keeps a delay above 0. The random half keeps clients that failed together from returning together.
    """

    first_s: float
    factor: float = 2.0
    max_s: float

    def __post_init__(self) -> None:
        if not SHORTEST_FIRST_S <= self.first_s < math.inf:
            raise ValueError(
                f"first_s must be a finite number of at least {SHORTEST_FIRST_S} seconds, not {self.first_s!r}"
            )
        if not 1.0 <= self.factor < math.inf:
            raise ValueError(f"factor must be a finite number of at least 1, not {self.factor!r}")
        if not self.first_s <= self.max_s < math.inf:
            raise ValueError(
                f"max_s must be a finite number of at least first_s ({self.first_s!r}) seconds, not {self.max_s!r}"
            )

    def delay_s(self, attempt: int, jitter: float) -> float:
        """Return the seconds to wait after failure number `attempt`, counted from 0.

        `jitter` is a random number in [0, 1) from the caller. The result is between half of the exponential delay and
        all of it.
        """
        if attempt < 0:
            raise ValueError(f"attempt must be 0 or more, not {attempt!r}")
        if not 0.0 <= jitter < 1.0:
            raise ValueError(f"jitter must be in [0, 1), not {jitter!r}")
        full_s = min(self._uncapped_s(attempt), self.max_s)
        return full_s * (0.5 + 0.5 * jitter)

    def _uncapped_s(self, attempt: int) -> float:
        if self.factor == 1.0:
            return self.first_s
        try:
            return self.first_s * self.factor**attempt
        except OverflowError:
            return math.inf
