"""Heartbeats of the leases that this box keeps: they count here, whatever has become of the leader and the database."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from math import inf

from gpu_worker_pool.core.fleet.custody import Custody
from gpu_worker_pool.core.fleet.custody_actions import KeptRenewal, RenewalState
from gpu_worker_pool.host.clock import iso_time
from gpu_worker_pool.ledger.loop import Waiters
from gpu_worker_pool.wire.leases import EndWarning, NotRenewed, Renewed
from gpu_worker_pool.wire.pool import BoxRenewAnswer

# While a client waits on an open connection, the server renews its lease, this often within the TTL.
RENEWALS_PER_TTL = 3


class Renewals:
    """`now` is the box's clock."""

    def __init__(self, custody: Custody, waiters: Waiters, now: Callable[[], float]) -> None:
        self._custody = custody
        self._waiters = waiters
        self._now = now
        self._is_stopped = False

    def stop(self) -> None:
        """Answer all renewals that are held; hold none from now on."""
        self._is_stopped = True
        self._waiters.release_all()

    async def renew(
        self,
        lease_ids: Sequence[str],
        caller_may: Callable[[str | None], bool],
        *,
        wait_s: float,
        warned: Collection[str],
    ) -> BoxRenewAnswer:
        """Renew the leases that this box keeps. `caller_may` says whether the caller may renew leases of this owner; if some are
        denied, none is renewed.

        With `wait_s`, and if there is no news and no lease that is elsewhere, it renews them again and again until one of
        them has ended or was warned, or the time is over. `warned` are the leases of whose warning the caller knows.
        """
        leases = self._custody.leases
        owners = [(id_, leases[id_].request.holder.owner) for id_ in lease_ids if id_ in leases]
        if denied := tuple(f"{id_} (of {owner})" for id_, owner in owners if not caller_may(owner)):
            return BoxRenewAnswer(denied=denied)
        began, known = self._now(), set(warned) & set(lease_ids)
        ttls_s = [leases[id_].request.ttl_s for id_, _ in owners]
        step_s = min(ttls_s, default=inf) / RENEWALS_PER_TTL
        answer, until = self._renewed(lease_ids, 0.0), began + wait_s
        while not (answer.elsewhere or answer.lost or _warned(answer) != known or self._is_stopped):
            if (left_s := until - self._now()) <= 0:
                break
            await self._waiters.wait(lease_ids, min(left_s, step_s))
            answer = self._renewed(lease_ids, self._now() - began)
        return answer

    def _renewed(self, lease_ids: Sequence[str], held_s: float) -> BoxRenewAnswer:
        now = self._now()
        found = self._custody.renew(lease_ids, now)
        return BoxRenewAnswer(
            renewed=tuple(_view(each, now) for each in found if each.state is RenewalState.RENEWED),
            lost=tuple(
                NotRenewed(id=each.lease_id, reason="unknown" if each.reason is None else str(each.reason))
                for each in found
                if each.state is RenewalState.ENDED
            ),
            elsewhere=tuple(each.lease_id for each in found if each.state is RenewalState.ELSEWHERE),
            held_s=held_s,
        )


def _view(renewal: KeptRenewal, now: float) -> Renewed:
    warning, expires_in_s = None, renewal.expires_in_s
    if renewal.warning is not None:
        in_s = max(renewal.warning.ends_s - now, 0.0)
        ends_at = iso_time(time.time() + in_s) or ""
        warning = EndWarning(reason=renewal.warning.reason, ends_at=ends_at, ends_in_s=round(in_s, 3))
    left_s = None if expires_in_s is None else round(max(expires_in_s, 0.0), 3)
    return Renewed(id=renewal.lease_id, expires_in_s=left_s, warning=warning)


def _warned(answer: BoxRenewAnswer) -> set[str]:
    return {renewed.id for renewed in answer.renewed if renewed.warning is not None}
