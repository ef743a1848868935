"""What the leader's machine for its boxes wants done, in order."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker_pool.core.model import commands as cmd

from .messages import LeaderMessage


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message on this session. Messages of one session keep their order."""

    session: int
    message: LeaderMessage


@dataclass(frozen=True, slots=True)
class Do:
    """Carry out a command; the order of commands counts. What it leads to comes back by `written`."""

    command: cmd.Command


@dataclass(frozen=True, slots=True)
class Close:
    """End a session, after what was told on it. `closed` need not be called for it."""

    session: int
    why: str


@dataclass(frozen=True, slots=True)
class Confirmed:
    """All boxes of a grant have it: its client may be told."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class NeverKept:
    """A box of this grant announced itself, and has never had it: no client was told of the grant, unless this leader did."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class Outdated:
    """A box has seen this epoch, which is above the leader's: the database was put back. The leader must lead in a later
    one, or no box that has seen it obeys.
    """

    epoch_seen: int


BoxAction = Tell | Do | Close | Confirmed | NeverKept | Outdated
