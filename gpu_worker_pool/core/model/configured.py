"""The facts that operators set: quotas, groups, bookings, tokens, GPUs out of service, processes that are ignored.

Each is a row of a table. One command sets or removes a row, and one event says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from .bounds import check_number, check_whole
from .gpu import GpuKey
from .request import MAX_PRIORITY, MAX_TIME_LIMIT_S

# Stands for all owners without a quota of their own.
EVERYBODY_ELSE = "*"
MAX_WEIGHT = 1e6
MAX_QUOTA = 1_000_000
MAX_NOTE = 200
MAX_MEMBERS = 1000
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")


@dataclass(frozen=True, slots=True)
class Quota:
    """What an owner may use of a pool. None: no limit.

    An owner may hold `gpus` GPUs at most; preemptible leases do not count. `weight` is the owner's part in a fair share.
    """

    gpus: int | None = None
    weight: float = 1.0
    max_priority: int | None = None
    max_time_limit_s: float | None = None
    max_queued: int | None = None

    def __post_init__(self) -> None:
        check_number("weight", self.weight, 0.001, MAX_WEIGHT)
        if self.max_time_limit_s is not None:
            check_number("max_time_limit_s", self.max_time_limit_s, 1, MAX_TIME_LIMIT_S)
        for name, least, most in (
            ("gpus", 0, MAX_QUOTA),
            ("max_priority", -MAX_PRIORITY, MAX_PRIORITY),
            ("max_queued", 0, MAX_QUOTA),
        ):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, least, most)


NO_QUOTA = Quota()


@dataclass(frozen=True, slots=True)
class Group:
    """Owners who have something together. `named` is as an administrator said it, with Unix groups as `@name`; `members` are the
    owners that this stands for.

    They may hold `quota` GPUs at most together; preemptible leases do not count. On `first_right` their requests go first: others
    get these GPUs preemptibly, or while no member waits for them.
    """

    named: tuple[str, ...]
    members: tuple[str, ...]
    quota: int | None = None
    first_right: tuple[GpuKey, ...] = ()

    def __post_init__(self) -> None:
        if self.quota is not None:
            check_whole("quota", self.quota, 0, MAX_QUOTA)


@dataclass(frozen=True, slots=True)
class Booking:
    """GPUs that are kept for a span of time. Times are wall-clock seconds: people book by the calendar. Without an owner
    nobody gets the GPUs in that time. Without an end they are taken out of service when it begins.
    """

    id: str
    gpus: tuple[GpuKey, ...]
    starts_at: float
    ends_at: float | None
    owner: str | None
    reason: str
    by: str | None = None

    @property
    def is_drain(self) -> bool:
        """Whether it takes its GPUs out of service."""
        return self.owner is None and self.ends_at is None


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
    """By a token a caller on another machine proves its name. It is known by its SHA-256 digest, in hexadecimal: the token
    itself is kept nowhere. `added_at` is a wall-clock time.
    """

    digest: str
    name: str
    role: Role
    added_at: float
    added_by: str | None = None
    note: str = ""

    def says(self, other: AccessToken) -> bool:
        """Whether it gives the same role to the same name, with the same note."""
        return (self.name, self.role, self.note) == (other.name, other.role, other.note)

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


Value = str | Quota | Group | AccessToken | Booking
# The key of a row: a node and a UUID for a GPU, else one text.
Key = tuple[str, ...]

# What the rows of each table are. `excluded`: why a GPU is out of service. `new_gpus`: the same for GPUs that are first seen
# from now on, in one row. `ignored_processes`: who said that processes of this name do not count as use from outside the pool.
TABLES: Final[dict[str, type[Value]]] = {
    "excluded": str,
    "new_gpus": str,
    "ignored_processes": str,
    "quotas": Quota,
    "groups": Group,
    "tokens": AccessToken,
    "bookings": Booking,
}
# The key of the one row of `new_gpus`.
ALL: Final = ("",)


def row_key(table: str, key: Key) -> GpuKey | str:
    """The key of a row in its table."""
    return GpuKey(*key) if table == "excluded" else key[0]
