"""What owners used lately, so that those who used little are served first.

Use fades: GPU time counts half after a half-life. What an owner holds now counts as it runs, so a lease of a month does
not look idle until it ends. Use is in thousandths of a GPU times seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

HALF_LIFE_S = 7 * 24 * 3600.0
RECENT_LEASES = 2
_FADES_S = HALF_LIFE_S / log(2)


@dataclass(slots=True)
class OwnerUse:
    """What one owner used and holds. `firm` is the part of `held` that is not preemptible. `recent` are the seconds that
    the owner's last leases lasted.
    """

    used: float = 0.0
    as_of: float = 0.0
    held: int = 0
    firm: int = 0
    recent: tuple[float, ...] = ()

    def used_at(self, now: float) -> float:
        """The faded use: what it was, and what has been held since."""
        if now <= self.as_of:
            return self.used
        left = float(2.0 ** (-(now - self.as_of) / HALF_LIFE_S))
        return self.used * left + self.held * _FADES_S * (1.0 - left)

    def hold(self, weight: int, now: float, *, is_firm: bool) -> None:
        """Hold so much more from now on, or less."""
        self.used, self.as_of = self.used_at(now), max(now, self.as_of)
        self.held += weight
        self.firm += weight if is_firm else 0

    def remember(self, lasted_s: float) -> None:
        self.recent = (*self.recent, lasted_s)[-RECENT_LEASES:]
