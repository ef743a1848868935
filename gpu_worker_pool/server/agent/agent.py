"""The agent of a box: keeps its leases, and tells the leader of the fleet what happens to them.

What to do is decided in core/fleet; here it is carried out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.fleet.custody_actions import (
    CloseLink,
    CustodyAction,
    Keep,
    KeepTokens,
    LookNow,
    Send,
    StopWatching,
    TellHolder,
    WatchProcess,
)
from gpu_worker_pool.core.fleet.messages import CannotKeep, GrantKept, LeaderMessage, Orders, Welcome
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.configured import AccessToken
from gpu_worker_pool.core.model.gpu import InventoryGpu
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.gpus.simulated import SimulatedProbe
from gpu_worker_pool.host.clock import boot_id, boot_time
from gpu_worker_pool.ledger.journal import JournalError
from gpu_worker_pool.ledger.loop import LiveTime, Waiters
from gpu_worker_pool.server.box.deaths import Holders, User
from gpu_worker_pool.server.box.sampler import Sampler
from gpu_worker_pool.server.box.snapshot import Snapshot, as_installed
from gpu_worker_pool.wire.pool import BoxRenewAnswer

from .custody_store import CustodyStore
from .frames import Leads
from .handshake import VERSION, FleetKey
from .joining import Joining, LeaderKnowledge
from .link import BoxLink, LinkLost, Serve
from .renewals import Renewals

logger = logging.getLogger(__name__)

# A disk that cannot be written is tried again after so long. Nothing is told to the leader meanwhile.
WRITE_AGAIN_S = 1.0


class Agent(Joining):
    """`serve` answers what the leader asks of this box. `tokens` are those that operators added, by their digests; `on_tokens`
    is called when they have changed.
    """

    def __init__(
        self,
        node: str,
        store: CustodyStore,
        sampler: Sampler,
        *,
        url: str,
        own_url: str,
        key: FleetKey,
        serve: Serve,
        on_tokens: Callable[[], None] = lambda: None,
        listed: Sequence[str] = (),
        leadership: LeaderKnowledge | None = None,
        simulated: SimulatedProbe | None = None,
        least_fence: int = 0,
    ) -> None:
        super().__init__(
            node, key, url=url, own_url=own_url, listed=listed, leadership=leadership, pool_id=store.pool_id
        )
        self._store = store
        self._sampler = sampler
        self._serve = serve
        self._on_tokens = on_tokens
        self._custody = store.custody(node, boot_id(), boot_time(), least_fence)
        self.tokens: Mapping[str, AccessToken] = {token.digest: token for token in self._custody.tokens}
        self._holders = Holders(self._on_death, simulated)
        self._waiters = Waiters()
        self._live = LiveTime(boot_time, self._custody.lose_time, self._tick)
        self._renewals = Renewals(self._custody, self._waiters, self._now)
        # What is to be carried out, each with the connection that it is for.
        self._todo: deque[tuple[CustodyAction, BoxLink | None]] = deque()
        self._has_work = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        # Why the disk of this box cannot be written, while that is so.
        self._cannot_write: str | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._loop = asyncio.get_running_loop()
        self._is_stopped = False

    # --- what the server sees ----------------------------------------------------------------------------------------

    def start(self) -> None:
        logger.info("%d leases are in the custody of this box", len(self._custody.leases))
        self._use_gpus()
        self._live.start()
        self._do(self._custody.start())
        self._tasks = [asyncio.create_task(self._work()), asyncio.create_task(self._stay_joined())]

    async def stop(self) -> None:
        """Stop. The leases stay on the disk; their holders keep them."""
        self._is_stopped = True
        self._live.stop()
        self.release_waiters()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._holders.close()
        await self._store.close()

    @property
    def trouble(self) -> str | None:
        if self._cannot_write is not None:
            return f"this box cannot keep leases, so nothing is granted on it: {self._cannot_write}"
        return super().trouble

    def release_waiters(self) -> None:
        """Answer all renewals that are held."""
        self._renewals.stop()

    async def renew(
        self,
        lease_ids: Sequence[str],
        caller_may: Callable[[str | None], bool],
        *,
        wait_s: float = 0.0,
        warned: Collection[str] = (),
    ) -> BoxRenewAnswer:
        return await self._renewals.renew(lease_ids, caller_may, wait_s=wait_s, warned=warned)

    def kept_pool(self, settings: PoolSettings) -> PoolState:
        state, now, readings = PoolState(settings=settings), boot_time(), self._sampler.snapshot.readings
        for command in (
            cmd.TakeOver(max(self._custody.epoch_seen, 1), boot_id()),
            cmd.SetWallTime(time.time() - now),
            cmd.AnnounceNode(self.node, boot_id(), self._inventory()),
            *(cmd.RecoverLease(kept, self.node) for kept in self._custody.leases.values()),
            cmd.Observe(tuple(replace(reading, at=now) for reading in readings)),
        ):
            step(state, command, now)
        return state

    def observe(self, snapshot: Snapshot) -> None:
        """Take in new readings, from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._observe, snapshot)

    # --- the link to the leader --------------------------------------------------------------------------------------

    async def _be_agent(self, link: BoxLink, leader_url: str) -> None:
        # What is announced must be on the disk.
        while not self._is_idle.is_set():
            await self._is_idle.wait()
        self._link, self._leader_url = link, leader_url
        self._do(self._custody.tick(self._now()))
        self._announce(link)
        try:
            await link.run(LeaderMessage | Leads, self._take, self._serve)
        finally:
            self._custody.disconnected()

    def _announce(self, link: BoxLink) -> None:
        is_candidate = self._leadership is not None
        link.send(self._custody.announce(self._url, VERSION, is_candidate, self._inventory()))
        self._live.ring_at(self._custody.next_due_at())

    def _inventory(self) -> tuple[InventoryGpu, ...] | None:
        readings = self._sampler.snapshot.readings
        return tuple(map(as_installed, readings)) if readings else None

    def _take(self, message: LeaderMessage | Leads) -> None:
        if isinstance(message, Leads):
            raise LinkLost(f"that box does not lead{f'; {message.url} does' if message.url else ''}", message.url)
        actions = self._custody.take(message, self._now())
        if isinstance(message, Orders) or (isinstance(message, Welcome) and self._custody.is_welcome):
            self._learn(message)
        self._do(actions)

    # --- what happens here -------------------------------------------------------------------------------------------

    def _now(self) -> float:
        """The time, at which something is about to be done. No lease has run while this process was away before that."""
        self._live.look()
        return boot_time()

    def _tick(self) -> None:
        self._do(self._custody.tick(boot_time()))

    def _use_gpus(self) -> None:
        """The GPUs of this box are used by the holders of its leases, and by no other."""
        users: dict[str, list[User]] = {reading.gpu.key.uuid: [] for reading in self._sampler.snapshot.readings}
        for lease in self._custody.leases.values():
            user = (lease.request.holder.process_on(self.node), lease.fence, lease.request.wishes.memory_mb)
            for uuid in lease.gpus:
                users.setdefault(uuid, []).append(user)
        self._holders.use(users)

    def _on_death(self, lease_id: str) -> None:
        self._do(self._custody.died(lease_id, self._now()))

    def _observe(self, snapshot: Snapshot) -> None:
        if self._link is None or self._is_stopped:
            return
        self._now()
        report = self._custody.report(snapshot.readings, snapshot.at)
        if report is not None:
            self._link.send(report)
            self._live.ring_at(self._custody.next_due_at())

    def _do(self, actions: Sequence[CustodyAction]) -> None:
        """Carry these out, after all that came before them."""
        if actions:
            self._todo.extend((action, self._link) for action in actions)
            self._is_idle.clear()
            self._has_work.set()
        self._live.ring_at(self._custody.next_due_at())

    async def _work(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            while self._todo:
                part = list(self._todo)
                self._todo.clear()
                # All of it is decided already, so it may be on the disk before the first of it is told.
                await self._write([action for action, _ in part])
                self._carry_out(part)
            self._is_idle.set()
            if self._cannot_write is not None:
                self._cannot_write = None
                logger.warning("this box can keep leases again")
                if self._link is not None and self._welcome is not None:
                    self._announce(self._link)

    async def _write(self, actions: Sequence[CustodyAction]) -> None:
        while True:
            try:
                await self._store.write(actions, self.pool_id)
            except JournalError as error:
                if self._cannot_write is None:
                    logger.error("this box cannot keep its leases, and takes none until that is fixed: %s", error)  # noqa: TRY400
                    self._cannot_write = str(error)
                    if self._link is not None and self._welcome is not None:
                        self._link.send(CannotKeep(self._cannot_write))
                await asyncio.sleep(WRITE_AGAIN_S)
            else:
                return

    def _carry_out(self, part: Sequence[tuple[CustodyAction, BoxLink | None]]) -> None:
        if any(isinstance(action, Keep) for action, _ in part):
            self._use_gpus()
        dead: set[str] = set()
        for action, link in part:
            match action:
                case WatchProcess(lease_id=lease_id, process=process):
                    if self._holders.is_alive(process):
                        self._holders.watch(process, lease_id)
                    else:
                        dead.add(lease_id)
                        self._on_death(lease_id)
                case KeepTokens(tokens=tokens):
                    self.tokens = {token.digest: token for token in tokens}
                    self._on_tokens()
                case StopWatching(lease_id=lease_id):
                    self._holders.forget(lease_id)
                case LookNow():
                    self._sampler.sample_soon()
                case TellHolder(lease_id=lease_id):
                    self._waiters.tell(lease_id)
                case Send(message=GrantKept(lease_id=lease_id)) if lease_id in dead:
                    pass  # the end is told instead
                case Send(message=message) if link is not None and link is self._link:
                    link.send(message)
                case CloseLink(why=why) if link is not None:
                    link.drop(why)
