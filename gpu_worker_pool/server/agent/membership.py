"""What the rest of the server knows of the fleet that this box belongs to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpu_worker_pool.core.fleet.boxes import BoxInfo
from gpu_worker_pool.wire.leases import NotRenewed, Renewed

# While a client waits on an open connection, the server renews its lease, this often within the TTL.
RENEWALS_PER_TTL = 3


@dataclass(frozen=True, slots=True)
class BoxRenewal:
    """The outcome of a renewal at this box. `elsewhere` are the ids that this box does not keep: the leader knows them.
    `denied` are leases that the caller may not renew, with their owners: then nothing was renewed. The leases were renewed
    `held_s` after the call had come, or later.
    """

    renewed: tuple[Renewed, ...] = ()
    lost: tuple[NotRenewed, ...] = ()
    elsewhere: tuple[str, ...] = ()
    denied: tuple[tuple[str, str | None], ...] = ()
    held_s: float = 0.0


class Membership(Protocol):
    """The fleet as this box sees it. A server without a fleet has None instead."""

    node: str

    @property
    def is_leader(self) -> bool:
        """Whether this process leads now, and is sure of it."""

    @property
    def leader_url(self) -> str | None:
        """Where to pass calls on; None while no leader is known, or while it does not take this box."""

    @property
    def key(self) -> str | None:
        """What to show with calls that are passed on: the leader gave it to this box. None without a connection to it."""

    @property
    def trouble(self) -> str | None:
        """Why no call can be passed on, in a sentence; None if calls can be."""

    @property
    def boxes(self) -> Mapping[str, str]:
        """The URL of each node of the fleet, as far as it is known."""

    @property
    def pool_id(self) -> str | None:
        """The identity of the fleet's pool, also before a leader is found; None if this box has never had one."""

    @property
    def box_infos(self) -> Mapping[str, BoxInfo]:
        """What the leader knows of each box that announced itself to it; empty elsewhere."""

    def node_of_key(self, key: str) -> str | None:
        """The box that shows this key with a call that it passes on. Only the leader knows that."""

    async def renew(
        self,
        lease_ids: Sequence[str],
        caller_may: Callable[[str | None], bool],
        *,
        wait_s: float = 0.0,
        warned: Collection[str] = (),
    ) -> BoxRenewal:
        """Renew the leases that this box keeps. `caller_may` says whether the caller may renew leases of this owner.

        With `wait_s`, and if there is no news and no lease that is elsewhere, it renews them again and again until one of
        them has ended or was warned, or the time is over. `warned` are the leases of whose warning the caller knows.
        """


class LeaderKnowledge(Protocol):
    """What this process knows of the leader, because it can lead itself."""

    @property
    def is_leading(self) -> bool:
        """Whether it leads now, and is sure of it."""

    @property
    def trouble(self) -> str | None:
        """Why it is not known who leads."""

    def leader_url(self) -> str | None:
        """The leader by the database; None if that is not known."""

    def stand_back(self) -> None:
        """Do not lead for a while: this box has another key than the leader."""

    def node_of_key(self, key: str) -> str | None:
        """As in Membership."""

    @property
    def box_infos(self) -> Mapping[str, BoxInfo]:
        """As in Membership."""
