"""The indices of a job array: `0-9`, `1,5,7-9`, `0-100:10`, and `0-99%4` for at most four at once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MOST_TASKS: Final = 10_000
MOST_INDEX: Final = 999_999_999
_ADVICE: Final = "write 0-9, 1,5,7-9, 0-100:10 (in steps of 10) or 0-99%4 (at most 4 at once)"
_PART: Final = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", re.ASCII)


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
