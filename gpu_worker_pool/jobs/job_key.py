"""The names of jobs: `12`, and `12_3` for task 3 of the array 12; and the indices that `--array` gives: `0-9`, `1,5,7-9`,
`0-100:10`, and `0-99%4` for at most four at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MOST_TASKS: Final = 10_000
MOST_INDEX: Final = 999_999_999
_ADVICE: Final = "write 0-9, 1,5,7-9, 0-100:10 (in steps of 10) or 0-99%4 (at most 4 at once)"
_PART: Final = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", re.ASCII)
_KEY: Final = re.compile(r"([1-9][0-9]{0,8})(?:_([0-9]{1,9}))?")


@dataclass(frozen=True, slots=True, order=True)
class JobKey:
    """A job: the number of its submission, and its index where that is an array."""

    number: int
    index: int | None = None

    def __str__(self) -> str:
        return str(self.number) if self.index is None else f"{self.number}_{self.index}"

    def includes(self, other: JobKey) -> bool:
        """Whether this name means that job: the number of an array means all its tasks."""
        return self.number == other.number and self.index in (None, other.index)


def parse_key(text: str) -> JobKey:
    """Read `12` or `12_3`; a ValueError says what was expected."""
    found = _KEY.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not the id of a job; an id is 12, or 12_3 for a task of an array")
    return JobKey(int(found[1]), None if found[2] is None else int(found[2]))


@dataclass(frozen=True, slots=True)
class ArrayTasks:
    """The indices in the order in which the tasks are run; at most `at_once` of them wait or run at a time."""

    indices: tuple[int, ...]
    at_once: int | None = None


def parse_array(text: str) -> ArrayTasks:
    """Read what `--array` says; a ValueError says what is wrong with it."""
    spans, percent, limit = text.strip().partition("%")
    if percent and not (limit.isascii() and limit.isdigit() and int(limit) >= 1):
        raise ValueError(f"{text!r} is not an array: after % comes how many may run at once, 1 or more; {_ADVICE}")
    indices: dict[int, None] = {}
    for part in spans.split(","):
        found = _PART.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{text!r} is not an array: {part.strip()!r} is not an index or a span; {_ADVICE}")
        first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        if last < first or step < 1:
            raise ValueError(f"{text!r} is not an array: {part.strip()!r} has no index in it; {_ADVICE}")
        if len(indices) + (last - first) // step + 1 > MOST_TASKS:
            raise ValueError(f"{text!r} has too many tasks; there must be at most {MOST_TASKS}")
        indices.update(dict.fromkeys(range(first, last + 1, step)))
    return ArrayTasks(tuple(indices), int(limit) if percent else None)
