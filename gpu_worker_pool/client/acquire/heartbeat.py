"""Keeps the leases at one endpoint alive, and says early when one is lost."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from math import inf

from gpu_worker_pool.client.backends.lease_backend import HeldLease, LeaseBackend
from gpu_worker_pool.errors import EndpointError
from gpu_worker_pool.host.clock import boot_time

logger = logging.getLogger("gpu_worker_pool.client")

# How soon to try again after a heartbeat that did not get through, or that the server did not hold.
TRY_AGAIN_S = 0.5
MOST_IDS = 500
# The server holds an answer for this part of the TTL; where no TTL runs, for this number of seconds.
HOLDS_PER_TTL = 6
LOCAL_HOLD_S = 25.0
# How long to wait before a call: leases that come together share one.
SETTLE_S = 0.25
# Statuses of a server that takes no heartbeat of this caller, however often it is sent.
REFUSED = frozenset({401, 403})


class Heartbeat:
    """One task for all leases at a backend: one call renews them all. The task runs while there are leases.

    `on_lost` and `on_warned` are called when the loss of a lease is set, and when its notice has changed.
    """

    def __init__(
        self,
        backend: LeaseBackend,
        on_lost: Callable[[HeldLease], None] = lambda _: None,
        on_warned: Callable[[HeldLease], None] = lambda _: None,
    ) -> None:
        self._backend = backend
        self._on_lost = on_lost
        self._on_warned = on_warned
        self._held: dict[str, HeldLease] = {}
        # Why the server refuses to renew; None if it does not.
        self._refusal: str | None = None
        # The call that is under way. It knows nothing of a lease that is added meanwhile.
        self._beat: asyncio.Task[bool] | None = None
        self._task: asyncio.Task[None] | None = None
        self._pid = os.getpid()

    def add(self, lease: HeldLease) -> None:
        lease.lost.extend(lease.safe_since)
        self._held[lease.id] = lease
        if self._beat is not None:
            self._beat.cancel()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="gpu-lease-heartbeat")

    def drop(self, lease_id: str) -> None:
        self._held.pop(lease_id, None)
        if not self._held and self._task is not None:
            self._task.cancel()
            self._task = None

    async def close(self) -> None:
        """Stop; leases that are still held expire."""
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        """Renew again and again. The server holds each answer back while all leases stand, so that a loss is known soon."""
        renewed_at, nap_s = boot_time(), 0.0
        while self._held and os.getpid() == self._pid:
            await asyncio.sleep(self._until_next(max(nap_s, min(SETTLE_S, self._hold_s()))))
            self.give_up_what_is_late()
            if not self._held:
                return
            hold_s, began = self._hold_s(), boot_time()
            # After calls that new leases cut short, a renewal must get through in time.
            wait_s = max(min(hold_s, renewed_at + 2 * hold_s - began), 0.0)
            try:
                has_news = await self._renew(wait_s)
            except EndpointError as error:
                nap_s = min(TRY_AGAIN_S, hold_s)
                if error.status in REFUSED:
                    self._say_refused(error)
                    nap_s = hold_s
            else:
                nap_s = 0.0
                if has_news is not None:
                    self._refusal, renewed_at = None, began
                    # A server that is busy, and one that stops, do not hold the answer.
                    is_early = not has_news and boot_time() - began < wait_s / 2
                    nap_s = min(TRY_AGAIN_S, hold_s) if is_early else 0.0
            self.give_up_what_is_late()

    def _say_refused(self, error: EndpointError) -> None:
        """Say once that the server refuses to renew, and what follows."""
        what = "the server refuses the token" if error.status == 401 else "the server refuses to renew"
        is_said, self._refusal = self._refusal is not None, f"{what}: {error.reason.rstrip('. ')}"
        if is_said:
            return
        left_s = self._until_next(inf)
        follows = "they go on while their processes run" if left_s == inf else f"they are given up in {left_s:.0f} s"
        logger.warning("leases at %s cannot be renewed, so %s: %s", error.endpoint_id, follows, self._refusal)

    def _hold_s(self) -> float:
        """How long the server may hold an answer: so that another call fits in before a lease is given up."""
        ttls_s = [lease.lost.ttl_s for lease in self._held.values() if not lease.lost.is_local]
        return min(min(ttls_s, default=inf) / HOLDS_PER_TTL, LOCAL_HOLD_S)

    def _until_next(self, nap_s: float) -> float:
        """How long until the next heartbeat, or until a lease is to be given up."""
        ends = [lease.lost.ends_at for lease in self._held.values()]
        soonest = min((at for at in ends if at is not None), default=inf)
        return max(min(nap_s, soonest - boot_time()), 0.0)

    async def _renew(self, wait_s: float) -> bool | None:
        """Send a heartbeat; whether it brought a warning, or None if it took too long or a lease was added."""
        beat = self._beat = asyncio.ensure_future(self._send(wait_s))
        try:
            # No longer than until a lease is to be given up.
            await asyncio.wait([beat], timeout=self._until_next(wait_s + max(2 * self._hold_s(), TRY_AGAIN_S)))
            return beat.result() if beat.done() and not beat.cancelled() else None
        finally:
            beat.cancel()
            self._beat = None

    async def _send(self, wait_s: float) -> bool:
        leases, has_news = list(self._held.values()), False
        for start in range(0, len(leases), MOST_IDS):
            is_last = start + MOST_IDS >= len(leases)
            asked = leases[start : start + MOST_IDS]
            warned = [lease.id for lease in asked if lease.warned.is_set()]
            renewal = await self._backend.renew([lease.id for lease in asked], wait_s if is_last else 0.0, warned)
            for lease in [lease for lease in asked if lease.id in renewal.renewed and lease.id in self._held]:
                lease.lost.extend(renewal.renewed_at)
                if lease.warned.set(renewal.warnings.get(lease.id)):
                    has_news = True
                    self._on_warned(lease)
            for lease_id, over in renewal.lost.items():
                self._give_up(lease_id, over.words or over.reason, over.reason)
        return has_news

    def give_up_what_is_late(self) -> None:
        """Declare those leases lost that were not renewed in time."""
        for lease in list(self._held.values()):
            if lease.lost.is_set():
                self._give_up(lease.id, self._refusal or "no heartbeat got through in time")

    def _give_up(self, lease_id: str, reason: str, code: str | None = None) -> None:
        lease = self._held.pop(lease_id, None)
        if lease is not None and lease.lost.set(reason, code):
            self._on_lost(lease)
