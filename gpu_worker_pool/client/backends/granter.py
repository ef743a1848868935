"""The server that granted a lease. What another server says of the lease is not believed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from gpu_worker_pool.client.http.transport import Reply
from gpu_worker_pool.host.connections import UserNotKnown
from gpu_worker_pool.host.users import user_name

_ROOT = 0


@dataclass(frozen=True, slots=True)
class Granter:
    """A pool by its identity, and on this machine the Unix user of its server; None where either is not known.

    Any user can start a server on a free port, and can copy an identity; no user can take another user's.
    """

    pool_id: str | None
    uid: int | None = None

    @classmethod
    def of(cls, reply: Reply, pool_id: str | None) -> Self:
        try:
            return cls(pool_id, reply.server_uid())
        except UserNotKnown:
            return cls(pool_id)

    def has_answered(self, answering: Granter) -> bool:
        """Whether this is the one that answered. An older server has no identity, and is believed."""
        if self.pool_id is not None and answering.pool_id != self.pool_id:
            return False
        return self.uid is None or answering.uid in {self.uid, _ROOT}

    def __str__(self) -> str:
        pool = "a pool without an identity" if self.pool_id is None else f"pool {self.pool_id[:8]}"
        return pool if self.uid is None else f"{pool} of user {user_name(self.uid)}"
