"""A token by which a caller on another machine proves its name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

MAX_NOTE = 200
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")


class Role(StrEnum):
    """What a caller may do beside managing its own leases.

    An operator looks after the GPUs: drains them, books them, ends leases. An administrator also decides who may use
    how much (quotas, tokens), and requests leases for others.
    """

    USER = "user"
    OPERATOR = "operator"
    ADMINISTRATOR = "administrator"


@dataclass(frozen=True, slots=True)
class AccessToken:
    """A token is known by its SHA-256 digest, in hexadecimal: the token itself is kept nowhere. `added_at` is a wall-clock
    time.
    """

    digest: str
    name: str
    role: Role
    added_at: float
    added_by: str | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if not _DIGEST.fullmatch(self.digest):
            raise ValueError("the digest of a token must be its SHA-256 in 64 hexadecimal digits, in lower case")
        if not is_name(self.name):
            raise ValueError("the name of a token must be 1 to 64 letters, digits or signs (. _ @ -)")
        if len(self.note) > MAX_NOTE or not self.note.isprintable():
            raise ValueError(f"the note of a token must be at most {MAX_NOTE} printable characters")


def is_name(text: str) -> bool:
    """Whether a token may have this name."""
    return _NAME.fullmatch(text) is not None
