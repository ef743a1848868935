"""Which lease held which GPU, and when."""

from __future__ import annotations

from typing import NamedTuple

from gpu_worker_pool.core.model.lease import ActiveLease, EndedLease, EndReason


class LeaseSpan(NamedTuple):
    """The time a lease held a GPU, in seconds since 1970. `until` and `end_reason` are None while it holds it.

    `ended_by` names the caller that ended it, unless its holder did.
    """

    lease_id: str
    owner: str | None
    worker_id: str | None
    label: str | None
    since: float
    until: float | None
    end_reason: EndReason | None
    is_shared: bool
    ended_by: str | None = None


class Timeline:
    """Collects the leases that held GPUs between `since` and `now`: a span for each of their GPUs, by GPU UUID.

    It has room for `most` spans. The first ones added are kept, so the latest must be added first; `is_cut` says that
    some were left out. A lease with unknown times, or times that run backwards because a clock was set, is left out and
    counted in `unknown_leases`. With a `node`, only its GPUs count.
    """

    def __init__(self, since: float, now: float, *, most: int, node: str | None = None) -> None:
        self.since = since
        self.now = now
        self.by_gpu: dict[str, list[LeaseSpan]] = {}
        self.unknown_leases = 0
        self.is_cut = False
        self._room = most
        self._node = node

    def add(self, lease: ActiveLease | EndedLease) -> None:
        ended = lease if isinstance(lease, EndedLease) else None
        until, reason, by = (ended.ended_at, ended.reason, ended.by) if ended else (None, None, None)
        granted_at, ended_at = lease.granted_at, self.now if until is None else until
        # A clock that was never set says 1970. A time before 1970 or after now comes from a clock that was set.
        if granted_at is None or not 0 <= granted_at <= ended_at <= self.now:
            self.unknown_leases += 1
            return
        gpus = [key for key in lease.gpus if self._node in {None, key.node}]
        if ended_at < self.since or not gpus:
            return
        if self.is_cut or len(gpus) > self._room:
            self.is_cut = True  # a lease shown on only some of its GPUs would mislead
            return
        self._room -= len(gpus)
        holder = lease.request.holder
        span = LeaseSpan(
            lease.id,
            holder.owner,
            holder.worker_id,
            dict(lease.request.labels).get("command"),
            granted_at,
            until,
            reason,
            lease.request.wishes.is_shared,
            by,
        )
        for gpu in gpus:
            self.by_gpu.setdefault(gpu.uuid, []).append(span)
