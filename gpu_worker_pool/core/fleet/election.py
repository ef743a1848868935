"""Which candidate leads. Pure: facts in, actions out; the time is the candidate's own boot clock and an argument.

The driver calls `wake` when `wake_at` is reached, carries out the actions, and tells the answers. It asks `may_act`
before every answer that counts: a process may be stopped at any point, for any time, and no timer of it has run since.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf

from .leadership import LeaderRow


@dataclass(frozen=True, slots=True)
class ElectionPace:
    """How often a candidate asks. `spread_s` is its own: of several candidates, not all claim at once. A leader that writes
    nothing renews so often that two seconds without the database, or without processor time, cost nothing.

    `trust_s` is shorter than the leadership lasts in the database, so that the old leader has stopped before another
    one can begin, also if their clocks run at slightly different rates.

    A candidate that could not read the journal lets the others go first for `unable_s`.
    """

    spread_s: float = 0.0
    poll_every_s: float = 0.5
    renew_every_s: float = 0.5
    retry_after_s: float = 0.25
    answer_within_s: float = 1.0
    trust_s: float = 2.5
    unable_s: float = 6.0
    stand_back_s: float = 60.0


@dataclass(frozen=True, slots=True)
class ReadLeader:
    """Ask the database who leads."""

    number: int


@dataclass(frozen=True, slots=True)
class ClaimLeadership:
    number: int
    term: str
    seen_epoch: int


@dataclass(frozen=True, slots=True)
class RenewLeadership:
    number: int
    epoch: int
    term: str
    sent_at: float = field(default=-inf, compare=False)


@dataclass(frozen=True, slots=True)
class HandOverLeadership:
    """Let the leadership expire at once. The answer does not matter."""

    epoch: int
    term: str


@dataclass(frozen=True, slots=True)
class LeadershipWon:
    """Catch up with `row.end`, write `TakenOver`; then call `Election.open`. The row, and with it the database's clock, was
    heard at `heard_at`.
    """

    epoch: int
    term: str
    row: LeaderRow
    heard_at: float


@dataclass(frozen=True, slots=True)
class LeadershipLost:
    """Refuse all callers, drop the state, and read the truth from the journal."""

    epoch: int
    reason: str


ElectionQuestion = ReadLeader | ClaimLeadership | RenewLeadership
ElectionAction = ElectionQuestion | HandOverLeadership | LeadershipWon | LeadershipLost


@dataclass(frozen=True, slots=True)
class Leadership:
    """A leadership that was won. It is trusted until `trusted_until`; `is_open` once its TakenOver is written."""

    epoch: int
    term: str
    trusted_until: float
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class _Asked:
    question: ElectionQuestion
    sent_at: float


@dataclass(slots=True)
class Election:
    """One candidate's part in the election. `new_term` makes a random id for each claim."""

    new_term: Callable[[], str]
    pace: ElectionPace = field(default_factory=ElectionPace)
    # The highest epoch that this candidate has seen: a database that lost commits may have forgotten it.
    seen_epoch: int = 0
    leadership: Leadership | None = None
    is_retiring: bool = False
    is_stopped: bool = False
    # The last word of the database, and when it came.
    row: LeaderRow | None = None
    heard_at: float = -inf
    _claim_after: float = -inf
    _asked: _Asked | None = None
    _ask_at: float = -inf
    _numbers: int = 0
    # The term of a claim whose outcome is not known. Nothing was ever written with it.
    _unconfirmed: str | None = None

    def may_act(self, now: float) -> bool:
        """Whether this candidate leads and may answer. The driver asks before every answer that counts."""
        return self.leadership is not None and self.leadership.is_open and self.is_trusted(now)

    def is_trusted(self, now: float) -> bool:
        """Whether no other candidate can lead now."""
        return self.leadership is not None and now < self.leadership.trusted_until

    @property
    def wake_at(self) -> float:
        """When to call `wake` next, if no answer comes before."""
        if self.is_stopped:
            return inf
        next_at = self._ask_at if self._asked is None else self._asked.sent_at + self.pace.answer_within_s
        return next_at if self.leadership is None else min(next_at, self.leadership.trusted_until)

    def wake(self, now: float) -> list[ElectionAction]:
        if self.is_stopped:
            return []
        lost: list[ElectionAction] = []
        if self.leadership is not None and not self.is_trusted(now):
            mine = self.leadership
            # If only the answers are lost, this makes place for the next leader at once.
            lost = self.step_down(mine.epoch, mine.term, "no renewal got through to the database in time", now)
        if self._asked is not None and now >= self._asked.sent_at + self.pace.answer_within_s:
            self._asked = None  # its answer is ignored from here on
            self._ask_at = now
        return [*lost, self._ask(now)] if self._may_ask(now) else lost

    def answered(self, question: ElectionQuestion, row: LeaderRow | None, now: float) -> list[ElectionAction]:
        """Take in an answer. None to a claim or a renewal: the database refused it."""
        if isinstance(question, RenewLeadership) and row is not None and self._is_mine(question.epoch, question.term):
            # However late the answer is: the database carried it out after it was sent.
            self._trust_from(question.sent_at)
        asked = self._asked
        if asked is None or asked.question.number != question.number or self.is_stopped:
            return []  # it comes after a newer question, or after the stop
        self._asked = None
        if now >= asked.sent_at + self.pace.answer_within_s:
            self._ask_at = now  # it tells of the past: this process was stopped, or the answer took long
            return []
        if row is not None:
            self._hear(row, now)
        if self.leadership is not None:
            if not isinstance(question, RenewLeadership):
                return []
            if row is None:
                return self._lose("the database has another leader, or the leadership expired", now)
            self._ask_at = asked.sent_at + self.pace.renew_every_s
            return []
        if row is None:
            self._ask_at = now  # another candidate was faster: read who
            self._unconfirmed = None
            return []
        if isinstance(question, ReadLeader):
            return self._follow(row, now)
        return self._win(question.term, row, asked.sent_at)

    def failed(self, question: ElectionQuestion, now: float) -> None:
        """Note that a question has no answer; whether it changed something may be unknown."""
        if self._asked is not None and self._asked.question.number == question.number:
            self._asked = None
            is_leading = self.leadership is not None
            self._ask_at = now + (self.pace.retry_after_s if is_leading else self.pace.poll_every_s)

    def appended(self, epoch: int, term: str, sent_at: float) -> None:
        """Note that an append of this leadership, sent at this time, was written: it has renewed the leadership."""
        if self._is_mine(epoch, term):
            self._trust_from(sent_at)
            if self._asked is None:
                self._ask_at = max(self._ask_at, sent_at + self.pace.renew_every_s)

    def open(self, epoch: int, term: str) -> None:
        """Note that TakenOver is written: from here on this candidate answers."""
        if self.leadership is not None and self._is_mine(epoch, term):
            self.leadership = replace(self.leadership, is_open=True)

    def step_down(self, epoch: int, term: str, reason: str, now: float) -> list[ElectionAction]:
        """Give up this leadership, if it is still had. If the database has it as well, any candidate may claim at once."""
        return [*self._lose(reason, now), HandOverLeadership(epoch, term)] if self._is_mine(epoch, term) else []

    def fail_to_lead(self, epoch: int, term: str, reason: str, now: float) -> list[ElectionAction]:
        """Give up a leadership that could not begin, because the journal cannot be read. The others go first from now on."""
        if not self._is_mine(epoch, term):
            return []
        self._claim_after = now + self.pace.unable_s
        return self.step_down(epoch, term, reason, now)

    def lead_later_epoch(self, epoch_seen: int, reason: str, now: float) -> list[ElectionAction]:
        """Give up a leadership of an epoch that boxes do not obey any more, and claim one above what they have seen."""
        mine = self.leadership
        self.see_epoch(epoch_seen)
        return [] if mine is None else self.step_down(mine.epoch, mine.term, reason, now)

    def stand_back(self, now: float) -> None:
        """Let the others lead for a while: a living leader has another key than this candidate, so it may be that no box would
        take this one.
        """
        self._claim_after = max(self._claim_after, now + self.pace.stand_back_s)

    def retire(self) -> None:
        """Begin a clean stop: claim nothing more. A leader keeps what it has until all is written; then call `stop`."""
        self.is_retiring = True
        self.is_stopped = self.leadership is None

    def stop(self) -> list[ElectionAction]:
        """Stop for good. The next leader need not wait for the leadership to expire."""
        self.is_stopped = True
        mine, self.leadership = self.leadership, None
        return [] if mine is None else [HandOverLeadership(mine.epoch, mine.term)]

    def see_epoch(self, epoch: int) -> None:
        self.seen_epoch = max(self.seen_epoch, epoch)

    def _may_ask(self, now: float) -> bool:
        return not self.is_stopped and self._asked is None and now >= self._ask_at

    def _is_mine(self, epoch: int, term: str) -> bool:
        mine = self.leadership
        return mine is not None and (mine.epoch, mine.term) == (epoch, term)

    def _hear(self, row: LeaderRow, now: float) -> None:
        self.see_epoch(row.epoch)
        self.row, self.heard_at = row, now

    def _follow(self, row: LeaderRow, now: float) -> list[ElectionAction]:
        """Say when to ask again: at the next poll, or when the leadership is told to expire."""
        if row.expires_in_s > 0 and row.term is not None and row.term == self._unconfirmed:
            self._ask_at = now  # the claim got through after all; a renewal says from when on it is trusted
            return []
        self._unconfirmed = None
        self._ask_at = min(now + self.pace.poll_every_s, self._free_at(row))
        return []

    def _free_at(self, row: LeaderRow) -> float:
        """When this candidate may claim, as far as this row tells."""
        return max(self.heard_at + max(row.expires_in_s, 0.0) + self.pace.spread_s, self._claim_after)

    def _is_claim_due(self, now: float) -> bool:
        """Whether the database is told to have no leader. A candidate that hears no answers claims nothing: its claims
        might be carried out, and would keep the others from leading.
        """
        row = self.row
        if row is None or now - self.heard_at > 2 * self.pace.poll_every_s + self.pace.spread_s:
            return False
        return now >= self._free_at(row)

    def _ask(self, now: float) -> ElectionQuestion:
        self._numbers += 1
        number, row = self._numbers, self.row
        question: ElectionQuestion
        if self.leadership is not None:
            question = RenewLeadership(number, self.leadership.epoch, self.leadership.term, now)
        elif self._unconfirmed is not None and row is not None and row.term == self._unconfirmed:
            question = RenewLeadership(number, row.epoch, self._unconfirmed, now)
        elif self._is_claim_due(now):
            self._unconfirmed = self.new_term()
            question = ClaimLeadership(number, self._unconfirmed, self.seen_epoch)
            self.heard_at = -inf  # after a claim without an answer, the next question is who leads
        else:
            question = ReadLeader(number)
        self._asked = _Asked(question, now)
        return question

    def _win(self, term: str, row: LeaderRow, sent_at: float) -> list[ElectionAction]:
        self._unconfirmed = None
        self.leadership = Leadership(row.epoch, term, sent_at + self.pace.trust_s)
        self._ask_at = sent_at + self.pace.renew_every_s
        return [LeadershipWon(row.epoch, term, row, self.heard_at)]

    def _trust_from(self, sent_at: float) -> None:
        if self.leadership is not None:
            until = max(self.leadership.trusted_until, sent_at + self.pace.trust_s)
            self.leadership = replace(self.leadership, trusted_until=until)

    def _lose(self, reason: str, now: float) -> list[ElectionAction]:
        lost, self.leadership = self.leadership, None
        self._asked, self._ask_at, self._unconfirmed = None, now, None
        self.is_stopped = self.is_stopped or self.is_retiring
        return [] if lost is None else [LeadershipLost(lost.epoch, reason)]
