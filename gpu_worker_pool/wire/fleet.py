"""Bodies about a fleet: its boxes, and what boxes say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .leases import RenewAnswer

# What a box is asked on its link to renew leases that it keeps.
RENEW_AT_BOX = "renew"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxView:
    """A box of the fleet. Its state is `unknown` while the leader does not hear from it: then nothing is granted there,
    and its leases go on. `url`, `version` and `is_candidate` are null until it has announced itself to this leader. `trouble`
    is why it cannot keep leases, in a sentence: then nothing is granted there either.
    """

    node: str
    url: str | None = None
    state: Literal["up", "unknown"] = "unknown"
    version: str | None = None
    is_candidate: bool | None = None
    is_leader: bool = False
    heard_ago_s: float | None = None
    trouble: str | None = None
    gpus: int = 0
    leases: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetList:
    """The fleet, as its leader knows it. `leader` is the node of the box that leads, `id` that of the pool."""

    id: str | None
    epoch: int | None
    leader: str | None
    boxes: tuple[BoxView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRenewForm:
    """Leases to renew at the box that keeps them, for a caller that another box knows."""

    ids: tuple[str, ...]
    wait_s: float = 0.0
    warned: tuple[str, ...] = ()
    caller: str | None = None
    is_local: bool = False
    is_admin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRenewAnswer(RenewAnswer):
    """`elsewhere` are leases that this box does not keep; `denied` those that the caller may not renew."""

    elsewhere: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()
