"""How a box finds the leader of its fleet.

A candidate reads it from the database. All others, and a candidate that is cut off from the database, ask the boxes that
they were told of, a few at a time: each of them says who leads, as far as it knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from gpu_worker_pool.host.pauses import Backoff

PACE = Backoff(first_s=0.1, max_s=1.0)
# A leader that went silent is not tried again for so long. It may hang, and then another one leads soon: an attempt to
# join the old one would only find out later.
AVOIDED_S = 1.5
# So often a candidate without a leader looks whether the database names another one.
LOOK_S = 0.1
# A box that does not answer takes long to say so, and keeps few others from being asked.
ASKED_AT_ONCE = 4
# Of the boxes that a leader told of, so many are asked in a round: mostly they know no more than this one, and they are many.
LEARNED_A_ROUND = 4


@dataclass(frozen=True, slots=True)
class AskBoxes:
    """Ask these boxes who leads, all at once, until one has named a leader."""

    urls: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JoinLeader:
    url: str


@dataclass(frozen=True, slots=True)
class PauseUntil:
    at: float


SearchStep = AskBoxes | JoinLeader | PauseUntil


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
        self._failed: str | None = None
        self._to_ask: list[str] | None = None
        self._attempts = 0
        self._not_before = -inf
        self._avoided: tuple[str | None, float] = (None, -inf)
        self.trouble: str | None = None

    def learn(self, urls: Iterable[str]) -> None:
        """Note boxes of the fleet that a leader has told of."""
        self._learned = tuple(urls)

    def next_step(self, now: float, known: str | None) -> SearchStep:
        """What to do next. `known` is the leader by the database, for a candidate: one that was not tried is tried at once."""
        if now < self._not_before and known in (None, self._failed):
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
            self._to_ask = [url for url in self._of_a_round() if url != avoided]
        if not self._to_ask:
            self.trouble = self.trouble or "no box of the fleet says who leads"
            self._pause(now)
            return PauseUntil(self._not_before)
        asked, self._to_ask = self._to_ask[:ASKED_AT_ONCE], self._to_ask[ASKED_AT_ONCE:]
        return AskBoxes(tuple(asked))

    def _of_a_round(self) -> Iterable[str]:
        # The last leader first: it may be only the connection that broke.
        last = () if self._last is None else (self._last,)
        begin = int(self._spread * len(self._learned)) + self._attempts * LEARNED_A_ROUND
        learned = (self._learned * 2)[begin % max(len(self._learned), 1) :][:LEARNED_A_ROUND]
        return dict.fromkeys((*last, *self._listed, *learned))

    def told(self, url: str, leader: str | None, now: float) -> bool:
        """A box has answered. Whether it named a leader that can be tried."""
        if leader is None:
            self.trouble = f"{url} answers, and knows no leader"
            return False
        is_avoided = leader == self._avoided[0] and now < self._avoided[1]
        if self._leader is None or not is_avoided:
            self._leader = leader
        return not is_avoided

    def silent(self, url: str, why: str) -> None:
        self.trouble = f"{url} does not answer ({why})"

    def joined(self, url: str) -> None:
        """The leader has taken this box."""
        self._last, self._attempts, self.trouble = url, 0, None

    def parted(self, url: str, why: str, now: float, *, is_silent: bool = False) -> None:
        """There is no connection to the leader at this URL, or it ended. With `is_silent` nothing was heard of it."""
        self._leader, self._failed, self.trouble = None, url, why
        if is_silent:
            self._avoided = (url, now + AVOIDED_S)
        self._pause(now)

    def _pause(self, now: float) -> None:
        self._to_ask = None
        self._not_before = now + PACE.delay_s(self._attempts, self._spread)
        self._attempts += 1
