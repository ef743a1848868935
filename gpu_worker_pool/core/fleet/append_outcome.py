"""What became of an append that the database refused, or whose answer was lost. Only the leader's row can tell."""

from __future__ import annotations

from dataclasses import dataclass

from .leadership import LeaderRow


@dataclass(frozen=True, slots=True)
class Append:
    """An append as it was sent: `count` events after `head`, under an id of its own."""

    epoch: int
    term: str
    head: int
    batch: str
    count: int

    @property
    def new_head(self) -> int:
        return self.head + self.count


@dataclass(frozen=True, slots=True)
class AppendWritten:
    """All of it is in the journal, once."""

    head: int


@dataclass(frozen=True, slots=True)
class AppendMissing:
    """Nothing of it is in the journal. The same append may be tried again, with the same id and the same head."""


@dataclass(frozen=True, slots=True)
class CommitsLost:
    """The database failed over to a standby that was behind. The leadership is still this one. What stood after `head`
    must be written again, before anything else.
    """

    head: int


@dataclass(frozen=True, slots=True)
class Deposed:
    """This leader may write nothing more. It steps down; `reason` says why."""

    reason: str


AppendOutcome = AppendWritten | AppendMissing | CommitsLost | Deposed


def judge_append(append: Append, row: LeaderRow) -> AppendOutcome:
    """Tell from the leader's row, read after the append was carried out or given up, what became of it.

    While the outcome is unknown, the append may still be carried out later. That is harmless: it can be written only once,
    because it moves the head that it is compared with.
    """
    if row.epoch < append.epoch:
        return Deposed(f"the database lost the claim of epoch {append.epoch}; it is at epoch {row.epoch} again")
    if (row.epoch, row.term) != (append.epoch, append.term):
        return Deposed(f"{row.holder or 'another candidate'} leads in epoch {row.epoch}")
    if row.batch == append.batch and row.head == append.new_head:
        return AppendWritten(row.head)
    if row.head == append.head:
        return AppendMissing()
    if row.head < append.head:
        return CommitsLost(row.head)
    return Deposed(f"the journal ends at {row.head} instead of {append.head}, and this leader did not write that")


def head_went_back(row: LeaderRow, epoch: int, term: str, written: int) -> bool:
    """Whether the database lost commits of this leader. `written` is the head that the leader knew when it *asked* for
    this row: answers may overtake each other.
    """
    return (row.epoch, row.term) == (epoch, term) and row.head < written
