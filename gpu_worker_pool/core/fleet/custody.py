"""What a box does about the leases on its GPUs: it keeps them on its disk, counts their heartbeats and watches their holders.

The leader grants and ends leases; whether a holder is alive is decided here. So a lease outlives the leader, the database
and the connection. Times named `now` are those of the box's boot clock. TTLs run on live time, which does not advance while
the box is away. Pool times come from the leader and are only passed back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpu_worker_pool.core.model.configured import AccessToken
from gpu_worker_pool.core.model.gpu import InventoryGpu, ProcessId, Reading
from gpu_worker_pool.core.model.lease import EndReason
from gpu_worker_pool.core.model.state import Deadlines

from .custody_actions import (
    CloseLink,
    CustodyAction,
    Keep,
    KeepTokens,
    KeptRenewal,
    LeaseWarning,
    LookNow,
    NoteSeen,
    RenewalState,
    Send,
    StopWatching,
    TellHolder,
    WatchProcess,
)
from .messages import (
    Announce,
    ComingEnd,
    GrantKept,
    HolderIsDead,
    KeptLease,
    LeaderMessage,
    LeaseOver,
    Orders,
    Rejected,
    Report,
    WatchOrder,
    Welcome,
)
from .reporting import LeaderSession


class Custody:
    """The leases of one box. It does no I/O: it returns actions, to be carried out in order, each before the next.

    `leases` and `over` are what the disk has; every lease gets a full TTL from `now` on. Carry out `start()` first.
    """

    def __init__(
        self,
        node: str,
        machine_id: str,
        boot_id: str,
        now: float,
        *,
        epoch_seen: int = 0,
        fence_seen: int = 0,
        leases: Iterable[KeptLease] = (),
        over: Iterable[LeaseOver] = (),
        tokens: Iterable[AccessToken] = (),
        instance: str = "",
    ) -> None:
        self.node, self.machine_id, self.boot_id, self._instance = node, machine_id, boot_id, instance
        self._leases = {lease.id: lease for lease in leases}
        self._over = {each.lease_id: each for each in over}
        # The tokens that operators added, as the leader told last.
        self.tokens = tuple(tokens)
        self.epoch_seen = epoch_seen
        fences = [lease.fence for lease in self._leases.values()] + [each.fence or 0 for each in self._over.values()]
        self.fence_seen = max([fence_seen, *fences])
        self._deadlines = Deadlines()
        self._watches: dict[str, ProcessId] = {}
        self._warnings: dict[str, LeaseWarning] = {}
        # The GPUs of leases that this box ended itself, until the leader says that they have ended.
        self._left: dict[str, tuple[str, ...]] = {}
        self._link: LeaderSession | None = None
        self._now = now
        self._lost_s = 0.0
        for lease in self._leases.values():
            self._restart_deadline(lease, now)

    @property
    def leases(self) -> Mapping[str, KeptLease]:
        """The leases on this box that have not ended, as far as it knows."""
        return self._leases

    @property
    def is_welcome(self) -> bool:
        """Whether the leader has answered the announcement on this connection."""
        return self._link is not None and self._link.epoch is not None

    def warning_of(self, lease_id: str) -> LeaseWarning | None:
        """When the leader ends this lease, if it said so."""
        return self._warnings.get(lease_id)

    def next_due_at(self) -> float:
        """When `tick` is to be called at the latest; infinite if nothing is due."""
        times = [self._deadlines.next_due_at() + self._lost_s]
        if self._link is not None:
            times.append(self._link.next_due_at())
        return min(times)

    # --- the connection ----------------------------------------------------------------------------------------------

    def start(self) -> list[CustodyAction]:
        """What a new agent does first: it watches the holders of the leases that it found on its disk."""
        return [action for lease in self._leases.values() for action in self._watched(lease)]

    def announce(
        self,
        url: str,
        version: str,
        is_candidate: bool,  # noqa: FBT001 - as in the message
        gpus: tuple[InventoryGpu, ...] | None,
    ) -> Announce:
        """Begin a connection: this is the first message on it."""
        self._link = LeaderSession()
        return Announce(
            node=self.node,
            machine_id=self.machine_id,
            boot_id=self.boot_id,
            url=url,
            version=version,
            is_candidate=is_candidate,
            epoch_seen=self.epoch_seen,
            fence_seen=self.fence_seen,
            gpus=gpus,
            leases=tuple(self._leases.values()),
            over=tuple(self._over.values()),
            instance=self._instance,
        )

    def disconnected(self) -> None:
        """The connection is gone. Leases go on."""
        self._link = None

    def take(self, message: LeaderMessage, now: float) -> list[CustodyAction]:
        """What a message of the leader leads to. `now` is read after the message has arrived."""
        self._now = max(now, self._now)
        link = self._link
        if link is None:
            return []
        if isinstance(message, Rejected):
            return [CloseLink(message.why)]
        if (why := self._why_refused(message, link)) is not None:
            return [CloseLink(why)]
        link.heard_at = self._now
        link.reporting.hear(self._now, message.time)
        if isinstance(message, Orders):
            return self._ordered(message, link)
        link.epoch = message.epoch
        if message.epoch == self.epoch_seen:
            return self._welcomed(message)
        # It is obeyed only once a restart of this agent would refuse an older leader.
        self.epoch_seen = message.epoch
        return [NoteSeen(self.epoch_seen, self.fence_seen), *self._welcomed(message)]

    def _why_refused(self, message: Welcome | Orders, link: LeaderSession) -> str | None:
        if message.epoch < self.epoch_seen:
            return f"the leader has epoch {message.epoch}, and this box has seen epoch {self.epoch_seen}"
        if isinstance(message, Orders) and message.epoch != link.epoch:
            return f"orders of epoch {message.epoch} came on a connection of epoch {link.epoch}"
        return None

    def _welcomed(self, message: Welcome) -> list[CustodyAction]:
        actions: list[CustodyAction] = []
        there = {lease.id for lease in message.leases}
        for lease_id in [id_ for id_ in (*self._leases, *self._over) if id_ not in there]:
            actions += self._dropped(lease_id)
        for lease in sorted(message.leases, key=lambda each: each.fence):
            actions += self._granted(lease)
        watched = {watch.lease_id for watch in message.watches}
        for lease_id in [id_ for id_ in self._watches if id_ not in watched]:
            actions += self._unwatched(lease_id)
        return [*actions, *self._watching(message.watches), *self._knowing(message.tokens), LookNow()]

    def _ordered(self, message: Orders, link: LeaderSession) -> list[CustodyAction]:
        actions: list[CustodyAction] = []
        # A lease may be in both: its grant was withdrawn, and then it was granted again.
        for lease_id in message.ended:
            gpus = self._leases[lease_id].gpus if lease_id in self._leases else self._left.get(lease_id, ())
            link.reporting.await_reading(gpus, message.time)
            actions += self._dropped(lease_id)
        for lease in message.grants:
            actions += self._granted(lease)
        for lease_id in message.unwatched:
            actions += self._unwatched(lease_id)
        actions += self._watching(message.watches)
        for warning in message.warnings:
            actions += self._warned(warning)
        actions += self._knowing(message.tokens)
        return [*actions, LookNow()] if message.look else actions

    def _knowing(self, tokens: tuple[AccessToken, ...] | None) -> list[CustodyAction]:
        if tokens is None or tokens == self.tokens:
            return []
        self.tokens = tokens
        return [KeepTokens(tokens)]

    # --- leases ------------------------------------------------------------------------------------------------------

    def _granted(self, lease: KeptLease) -> list[CustodyAction]:
        over, known = self._over.get(lease.id), self._leases.get(lease.id)
        if over is not None and (over.fence is None or over.fence >= lease.fence):
            return []  # the leader has been told, or will be
        self._over.pop(lease.id, None)
        self._left.pop(lease.id, None)
        self._leases[lease.id] = lease
        actions: list[CustodyAction] = [] if known == lease else [Keep(lease.id, lease)]
        is_new = known is None or known.fence != lease.fence
        if is_new or (known is not None and known.is_custodian != lease.is_custodian):
            self._restart_deadline(lease, self._now)
        if lease.fence > self.fence_seen:
            # After the lease: if the fence was seen and the lease is not there, it has ended.
            self.fence_seen = lease.fence
            actions.append(NoteSeen(self.epoch_seen, self.fence_seen))
        return [*actions, *self._watched(lease), Send(GrantKept(lease.id, lease.fence))] if is_new else actions

    def _dropped(self, lease_id: str) -> list[CustodyAction]:
        """The leader says that a lease has ended."""
        is_kept = self._forget(lease_id)
        if is_kept:
            return [Keep(lease_id, None), StopWatching(lease_id), TellHolder(lease_id)]
        return [Keep(lease_id, None)] if self._over.pop(lease_id, None) is not None else []

    def _ended(self, over: LeaseOver, gpus: tuple[str, ...]) -> list[CustodyAction]:
        """This box ends a lease. Nobody is told before it is on the disk: a restart would bring the lease back."""
        is_kept = self._forget(over.lease_id)
        self._over[over.lease_id], self._left[over.lease_id] = over, gpus
        actions: list[CustodyAction] = [Keep(over.lease_id, over)]
        if is_kept:
            actions.append(StopWatching(over.lease_id))
        if self._link is not None:
            actions.append(Send(over))
        return [*actions, TellHolder(over.lease_id)] if is_kept else actions

    def _forget(self, lease_id: str) -> bool:
        self._deadlines.drop(lease_id)
        self._warnings.pop(lease_id, None)
        self._left.pop(lease_id, None)
        return self._leases.pop(lease_id, None) is not None

    def _warned(self, warning: ComingEnd) -> list[CustodyAction]:
        if warning.lease_id not in self._leases:
            return []
        if warning.reason is None:
            self._warnings.pop(warning.lease_id, None)
        else:
            self._warnings[warning.lease_id] = LeaseWarning(warning.reason, self._now + warning.in_s)
        return [TellHolder(warning.lease_id)]

    def _restart_deadline(self, lease: KeptLease, now: float) -> None:
        if lease.is_custodian and lease.ttl_s is not None:
            self._deadlines.set(lease.id, now - self._lost_s + lease.ttl_s)
        else:
            self._deadlines.drop(lease.id)

    def renew(self, lease_ids: Sequence[str], now: float) -> list[KeptRenewal]:
        """Heartbeats, which arrived at `now`. A lease lives until a `tick` ends it."""
        self._now = max(now, self._now)
        return [self._renewed(lease_id, now) for lease_id in lease_ids]

    def _renewed(self, lease_id: str, now: float) -> KeptRenewal:
        lease = self._leases.get(lease_id)
        if lease is None:
            over = self._over.get(lease_id)
            if over is None:
                return KeptRenewal(lease_id, RenewalState.ELSEWHERE)
            return KeptRenewal(lease_id, RenewalState.ENDED, reason=over.reason)
        if not lease.is_custodian:
            return KeptRenewal(lease_id, RenewalState.ELSEWHERE, warning=self.warning_of(lease_id))
        due_at, live = self._deadlines.due_at(lease_id), now - self._lost_s
        if due_at is not None and lease.ttl_s is not None:
            due_at = max(due_at, live + lease.ttl_s)
            self._deadlines.set(lease_id, due_at)
        left_s = None if due_at is None else due_at - live
        return KeptRenewal(lease_id, RenewalState.RENEWED, left_s, self.warning_of(lease_id))

    def lose_time(self, lost_s: float) -> None:
        """This process was away for this long, and read nothing: neither heartbeats nor what the leader said."""
        self._lost_s += lost_s
        if self._link is not None and self._link.heard_at is not None:
            self._link.heard_at += lost_s

    def tick(self, now: float) -> list[CustodyAction]:
        """Time has passed."""
        self._now = max(now, self._now)
        actions: list[CustodyAction] = []
        for lease_id in list(self._deadlines.due(now - self._lost_s)):
            lease = self._leases[lease_id]
            actions += self._ended(LeaseOver(lease_id, lease.fence, EndReason.EXPIRED), lease.gpus)
        link = self._link
        if link is not None and link.heard_at is None:
            link.heard_at = now
        elif link is not None and (why := link.why_silent(now)) is not None:
            return [*actions, CloseLink(why)]
        if link is not None and (sign := link.sign_of_life(now)) is not None:
            actions.append(Send(sign))
        return actions

    # --- processes ---------------------------------------------------------------------------------------------------

    def _watched(self, lease: KeptLease) -> list[CustodyAction]:
        process = lease.request.holder.process_on(self.node)
        if process is None:
            return []
        self._watches.pop(lease.id, None)  # it waited
        return [WatchProcess(lease.id, process)]

    def _watching(self, watches: Iterable[WatchOrder]) -> list[CustodyAction]:
        new = [watch for watch in watches if watch.lease_id not in self._leases]
        self._watches.update((watch.lease_id, watch.process) for watch in new)
        return [WatchProcess(watch.lease_id, watch.process) for watch in new]

    def _unwatched(self, lease_id: str) -> list[CustodyAction]:
        return [] if self._watches.pop(lease_id, None) is None else [StopWatching(lease_id)]

    def died(self, lease_id: str, now: float) -> list[CustodyAction]:
        """The process that was watched for this lease is gone."""
        self._now = max(now, self._now)
        lease = self._leases.get(lease_id)
        if lease is not None:
            return self._ended(LeaseOver(lease_id, lease.fence, EndReason.HOLDER_DIED), lease.gpus)
        # Without a connection it stays watched: the next Welcome names it again.
        if not self.is_welcome or self._watches.pop(lease_id, None) is None:
            return []
        return [Send(HolderIsDead(lease_id))]

    # --- readings ----------------------------------------------------------------------------------------------------

    def report(self, readings: Sequence[Reading], began_s: float) -> Report | None:
        """What to tell of one look that began at `began_s`; None if the leader cannot use it."""
        if self._link is None:
            return None
        self._link.sent_at = self._now
        return self._link.reporting.report(readings, began_s)

    def __repr__(self) -> str:
        return f"<Custody of {self.node}: {len(self._leases)} leases, {len(self._over)} over, epoch {self.epoch_seen}>"
