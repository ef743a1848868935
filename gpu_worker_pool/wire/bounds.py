"""The bounds of every number and text that a caller may send, and the annotations that state them."""

from __future__ import annotations

import re
from dataclasses import dataclass

MIN_TTL_S = 0.1
MAX_WAIT_S = 300.0
MAX_MEMORY_MB = 1e9
MAX_PID = 2**23
MAX_IDS = 1000
MAX_LABELS = 32
MAX_LABEL_KEY = 64
# Of all labels of a lease, keys and values together, in UTF-8: every answer about the lease has them.
MAX_LABELS_BYTES = 4096
MAX_TEXT = 256
MAX_MODEL = 128
MAX_REASON = 200
MAX_PROCESS_NAME = 64
MAX_QUEUE = 999_999_999
FEWEST_HOURS, DEFAULT_HOURS, MOST_HOURS = 0.1, 6.0, 168.0
FEWEST_PACE_S, MOST_PACE_S = 0.1, 60.0

# Control characters and those that break a line or turn its direction are refused: these texts appear in logs and
# terminals. Python reads this pattern, and other programs read it in the OpenAPI document.
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]*$"
_PRINTABLE = re.compile(PRINTABLE.removesuffix("$") + r"\Z")
# Characters that need no escape in a URL; "." and ".." would not arrive, because they shorten a path.
LEASE_ID = r"^(?!\.{1,2}$)[A-Za-z0-9._~-]{1,128}$"
_LEASE_ID = re.compile(LEASE_ID.removesuffix("$").replace("{1,2}$", r"{1,2}\Z") + r"\Z")
_LABEL_KEY = re.compile(rf"[A-Za-z0-9._/-]{{1,{MAX_LABEL_KEY}}}")


@dataclass(frozen=True, slots=True)
class Range:
    low: float
    high: float

    def __str__(self) -> str:
        return f"{show_number(self.low)} to {show_number(self.high)}"


@dataclass(frozen=True, slots=True)
class Printable:
    """A text must have at most `longest` characters, all printable."""

    longest: int


@dataclass(frozen=True, slots=True)
class Note:
    """The description of a field in the OpenAPI document."""

    text: str


def show_number(value: float) -> str:
    return f"{value:.15g}"


def is_printable(text: str) -> bool:
    """Whether a text may appear in a log or on a terminal."""
    return _PRINTABLE.match(text) is not None and not any("\ud800" <= sign <= "\udfff" for sign in text)


def is_lease_id(text: str) -> bool:
    return _LEASE_ID.fullmatch(text) is not None


def is_label_key(text: str) -> bool:
    return _LABEL_KEY.fullmatch(text) is not None
