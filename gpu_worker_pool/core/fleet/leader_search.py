"""How a box finds the leader of its fleet.

A candidate reads it from the database. All others, and a candidate that is cut off from the database, ask the boxes that
they were told of, one after the other: each of them says who leads, as far as it knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from gpu_worker_pool.core.endpoints.backoff import Backoff

PACE = Backoff(first_s=0.1, max_s=1.0)
# A leader that went silent is not tried again for so long. It may hang, and then another one leads soon: an attempt to
# join the old one would only find out later.
AVOIDED_S = 1.5
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class AskBox:
    """Ask this box who leads."""

    url: str


@dataclass(frozen=True, slots=True)
class JoinLeader:
    url: str


@dataclass(frozen=True, slots=True)
class PauseUntil:
    at: float


SearchStep = AskBox | JoinLeader | PauseUntil


class LeaderSearch:
    """`listed` are the URLs of boxes that an operator named. `spread`, from 0 to below 1, is this box's own: it keeps many boxes
    from asking at the same moment. `trouble` says why no leader is found.
    """

    def __init__(self, listed: Sequence[str], spread: float) -> None:
        self._listed = tuple(listed)
        self._learned: tuple[str, ...] = ()
        self._spread = spread
        self._last: str | None = None
        self._leader: str | None = None
        self._to_ask: list[str] | None = None
        self._attempts = 0
        self._not_before = -inf
        self._avoided: tuple[str | None, float] = (None, -inf)
        self.trouble: str | None = None

    def learn(self, urls: Iterable[str]) -> None:
        """Note boxes of the fleet that a leader has told of."""
        self._learned = tuple(urls)

    def next_step(self, now: float, known: str | None) -> SearchStep:
        """What to do next. `known` is the leader by the database, for a candidate."""
        if now < self._not_before:
            return PauseUntil(self._not_before)
        avoided, until = self._avoided if now < self._avoided[1] else (None, now)
        leader = known or self._leader
        if leader is not None and leader != avoided:
            return JoinLeader(leader)
        if known is not None:
            return PauseUntil(min(now + LOOK_S, until))
        if self._leader is not None:
            self._leader = None
            self._pause(now)
            return PauseUntil(self._not_before)
        if self._to_ask is None:
            # The last leader first: it may be only the connection that broke.
            last = () if self._last is None else (self._last,)
            asked = dict.fromkeys((*last, *self._listed, *self._learned))
            self._to_ask = [url for url in asked if url != avoided]
        if not self._to_ask:
            self.trouble = self.trouble or "no box of the fleet says who leads"
            self._pause(now)
            return PauseUntil(self._not_before)
        return AskBox(self._to_ask.pop(0))

    def told(self, url: str, leader: str | None) -> None:
        """A box has answered."""
        if leader is not None:
            self._leader = leader
        else:
            self.trouble = f"{url} answers, and knows no leader"

    def silent(self, url: str, why: str) -> None:
        self.trouble = f"{url} does not answer ({why})"

    def joined(self, url: str) -> None:
        """The leader has taken this box."""
        self._last, self._attempts, self.trouble = url, 0, None

    def parted(self, why: str, now: float, silent: str | None = None) -> None:
        """There is no connection to the leader, or it ended. `silent` is the leader's URL if nothing was heard of it."""
        self._leader, self.trouble = None, why
        if silent is not None:
            self._avoided = (silent, now + AVOIDED_S)
        self._pause(now)

    def _pause(self, now: float) -> None:
        self._to_ask = None
        self._not_before = now + PACE.delay_s(self._attempts, self._spread)
        self._attempts += 1
