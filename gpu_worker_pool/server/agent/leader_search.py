"""How a box finds the leader of its fleet.

A candidate reads it from the database. All others, and a candidate that is cut off from the database, try to join the boxes
that they were told of, one after the other: a box that does not lead says who does, as far as it knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from gpu_worker_pool.host.pauses import Backoff

PACE = Backoff(first_s=0.1, max_s=1.0)
# A leader that went silent is not tried again for so long. It may hang, and then another one leads soon: an attempt to
# join the old one would only find out later.
AVOIDED_S = 1.5
# So often a candidate without a leader looks whether the database names another one.
LOOK_S = 0.1
# How many of the boxes that a leader named are tried in a round: there may be many, and most know no more than this one.
LEARNED_A_ROUND = 4


class LeaderSearch:
    """`listed` are the URLs of boxes that an operator named. `spread`, from 0 to below 1, is this box's own: it keeps many boxes
    from asking at the same moment. `trouble` says why no leader is found.
    """

    def __init__(self, listed: Sequence[str], spread: float) -> None:
        self._listed = tuple(listed)
        self._learned: tuple[str, ...] = ()
        self._spread = spread
        self._last: str | None = None
        # The leader that a box has named, and the one that was tried in vain.
        self._named: str | None = None
        self._failed: str | None = None
        # The boxes that are left in this round, and those that were silent in an earlier one: they come last.
        self._round: list[str] | None = None
        self._is_in_round = False
        self._silent: set[str] = set()
        self._attempts = 0
        self._not_before = -inf
        self._avoided: tuple[str | None, float] = (None, -inf)
        self.trouble: str | None = None

    def learn(self, urls: Iterable[str]) -> None:
        """Note boxes of the fleet that a leader has told of."""
        self._learned = tuple(urls)

    def next_step(self, now: float, known: str | None) -> str | float:
        """The URL of the box to join, or the time until which to wait. `known` is the leader by the database, for a candidate: one
        that was not tried is tried at once.
        """
        if now < self._not_before and known in (None, self._failed):
            return self._not_before
        avoided, until = self._avoided if now < self._avoided[1] else (None, now)
        named, self._named = self._named, None
        leader = known or named
        self._is_in_round = False
        if leader not in (None, avoided):
            return leader
        if known is not None:
            return min(now + LOOK_S, until)
        if self._round is None:
            self._round = sorted((url for url in self._of_a_round() if url != avoided), key=self._silent.__contains__)
        if not self._round:
            self.trouble = self.trouble or "no box of the fleet says who leads"
            return self._pause(now)
        self._is_in_round = True
        return self._round.pop(0)

    def _of_a_round(self) -> Iterable[str]:
        # The last leader first: it may be only the connection that broke.
        last = () if self._last is None else (self._last,)
        begin = int(self._spread * len(self._learned)) + self._attempts * LEARNED_A_ROUND
        learned = (self._learned * 2)[begin % max(len(self._learned), 1) :][:LEARNED_A_ROUND]
        return dict.fromkeys((*last, *self._listed, *learned))

    def joined(self, url: str) -> None:
        """The leader has taken this box."""
        self._last, self._attempts, self.trouble, self._is_in_round = url, 0, None, False
        self._silent.discard(url)

    def parted(self, url: str, why: str, now: float, *, leader: str | None = None, is_silent: bool = False) -> None:
        """The box at this URL takes this one not, or no longer; it named this `leader`. With `is_silent` nothing was heard of it."""
        self.trouble, self._named, self._failed = why, leader, url
        if is_silent:
            self._avoided = (url, now + AVOIDED_S)
            self._silent.add(url)
        if not self._is_in_round:
            self._pause(now)

    def _pause(self, now: float) -> float:
        self._round = None
        self._not_before = now + PACE.delay_s(self._attempts, self._spread)
        self._attempts += 1
        return self._not_before
