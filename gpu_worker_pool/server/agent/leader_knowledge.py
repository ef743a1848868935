"""What a box that can lead itself knows of the leader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from gpu_worker_pool.core.fleet.boxes import BoxInfo


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
