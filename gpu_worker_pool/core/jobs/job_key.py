"""The names of jobs: `12`, and `12_3` for task 3 of the array 12."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

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
