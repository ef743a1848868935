"""What a candidate's own agent knows of the leadership: it reads it from the database."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpu_worker_pool.core.fleet.boxes import BoxInfo
from gpu_worker_pool.server.authority.pool import Pool

from .fleet_leader import FleetLeader


class CandidateLeadership:
    def __init__(self, pool: Pool, leader: FleetLeader, stand_back: Callable[[], None]) -> None:
        self._pool = pool
        self._leader = leader
        self.node_of_key = leader.node_of_key
        self.stand_back = stand_back

    @property
    def is_leading(self) -> bool:
        return self._leader.is_leading

    @property
    def trouble(self) -> str | None:
        return self._pool.trouble

    @property
    def box_infos(self) -> Mapping[str, BoxInfo]:
        return self._leader.boxes

    def leader_url(self) -> str | None:
        fleet = self._pool.fleet()
        return None if fleet is None else fleet.leader_url
