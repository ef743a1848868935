"""The agent of a box: keeps its leases, and tells the leader of the fleet what happens to them.

What to do is decided in core/fleet; here it is carried out.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import aiohttp

from gpu_worker_pool.core.fleet.boxes import BoxInfo
from gpu_worker_pool.core.fleet.custody_actions import (
    CloseLink,
    CustodyAction,
    Drop,
    Keep,
    LookNow,
    NoteOver,
    Send,
    StopWatching,
    TellHolder,
    WatchProcess,
)
from gpu_worker_pool.core.fleet.messages import GrantKept, LeaderMessage, Orders, Welcome
from gpu_worker_pool.core.model.gpu import InventoryGpu
from gpu_worker_pool.gpus.simulated import SimulatedProbe
from gpu_worker_pool.host.clock import boot_id, boot_time
from gpu_worker_pool.ledger.journal import JournalError
from gpu_worker_pool.ledger.loop import LiveTime, Waiters
from gpu_worker_pool.server.agent.handshake import VERSION
from gpu_worker_pool.server.agent.leader_search import LOOK_S, AskBoxes, JoinLeader, LeaderSearch, PauseUntil
from gpu_worker_pool.server.box.deaths import Holders, User
from gpu_worker_pool.server.box.sampler import Sampler
from gpu_worker_pool.server.box.snapshot import Snapshot, as_installed
from gpu_worker_pool.wire.service import FleetView

from .custody_store import CustodyStore
from .handshake import FleetKey
from .link import LeaderLink, LinkLost, ask_who_leads, connect
from .membership import BoxRenewal, LeaderKnowledge
from .renewals import Renewals

logger = logging.getLogger(__name__)

# A disk that cannot be written is tried again after so long. Nothing is told to the leader meanwhile.
WRITE_AGAIN_S = 1.0


class Agent:
    """`url` is where other boxes reach this one, and `own_url` where this process reaches itself. `leadership` is None on
    a box that cannot lead: it asks the boxes that are `listed`.
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
        listed: Sequence[str] = (),
        leadership: LeaderKnowledge | None = None,
        simulated: SimulatedProbe | None = None,
        least_fence: int = 0,
    ) -> None:
        self.node = node
        self._store = store
        self._sampler = sampler
        self._url = url
        self._own_url = own_url
        self._fleet_key = key
        self._leadership = leadership
        self._custody = store.custody(node, boot_id(), boot_time(), least_fence)
        self._holders = Holders(self._on_death, simulated)
        self._search = LeaderSearch(listed, zlib.crc32(f"{node} {url}".encode()) % 1000 / 1000)
        self._waiters = Waiters()
        self._live = LiveTime(boot_time, self._custody.lose_time, self._tick)
        self._renewals = Renewals(self._custody, self._waiters, self._now)
        # What is to be carried out, each with the connection that it is for.
        self._todo: deque[tuple[CustodyAction, LeaderLink | None]] = deque()
        self._has_work = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._link: LeaderLink | None = None
        self._leader_url: str | None = None
        self._welcome: Welcome | None = None
        self.pool_id = store.pool_id
        self._boxes: dict[str, str] = {}
        self._said: str | None = None
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

    def release_waiters(self) -> None:
        """Answer all renewals that are held."""
        self._renewals.stop()

    @property
    def is_leader(self) -> bool:
        return self._leadership is not None and self._leadership.is_leading

    @property
    def leader_url(self) -> str | None:
        if self.is_leader:
            return self._url
        # Connected to itself, it led and is not sure that it still does: to pass a call on to itself would only cost more.
        is_other = self._welcome is not None and self._leader_url != self._url
        return self._leader_url if is_other else None

    @property
    def key(self) -> str | None:
        return None if self._welcome is None else self._welcome.key

    @property
    def trouble(self) -> str | None:
        if self.is_leader or self.leader_url is not None:
            return None
        known = None if self._leadership is None else self._leadership.trouble
        if self._welcome is not None:
            return known
        if known is not None and self._leadership is not None and self._leadership.leader_url() is None:
            return known
        why = "; ".join(filter(None, (self._search.trouble, known))) or "it looks for one"
        return f"this box has no connection to a leader of the fleet: {why}"

    @property
    def boxes(self) -> Mapping[str, str]:
        return self._boxes

    @property
    def box_infos(self) -> Mapping[str, BoxInfo]:
        return {} if self._leadership is None else self._leadership.box_infos

    def node_of_key(self, key: str) -> str | None:
        return None if self._leadership is None else self._leadership.node_of_key(key)

    async def renew(
        self,
        lease_ids: Sequence[str],
        caller_may: Callable[[str | None], bool],
        *,
        wait_s: float = 0.0,
        warned: Collection[str] = (),
    ) -> BoxRenewal:
        return await self._renewals.renew(lease_ids, caller_may, wait_s=wait_s, warned=warned)

    def view(self) -> FleetView:
        """The fleet as a box that cannot lead knows it."""
        url, welcome = self.leader_url, self._welcome
        return FleetView(
            id=self.pool_id,
            role="agent",
            epoch=welcome.epoch if welcome is not None else None,
            leader=next((node for node, box in self._boxes.items() if box == url), None),
            leader_url=url,
            lag_s=None,
        )

    def observe(self, snapshot: Snapshot) -> None:
        """Take in new readings, from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._observe, snapshot)

    # --- the connection ----------------------------------------------------------------------------------------------

    async def _stay_joined(self) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                step = self._search.next_step(boot_time(), self._leader_by_database())
                match step:
                    case PauseUntil(at=at):
                        self._say_trouble()
                        pause_s = max(at - boot_time(), 0.0)
                        await asyncio.sleep(pause_s if self._leadership is None else min(pause_s, LOOK_S))
                    case AskBoxes(urls=urls):
                        await ask_who_leads(session, urls, self._search)
                    case JoinLeader(url=url):
                        try:
                            await self._join_unless_replaced(session, url)
                        except LinkLost as lost:
                            self._search.parted(url, str(lost), boot_time(), is_silent=lost.is_silent)
                            if lost.has_other_key and self._leadership is not None:
                                self._leadership.stand_back()
                            if lost.leader is not None:
                                self._search.told(url, lost.leader, boot_time())

    def _leader_by_database(self) -> str | None:
        return None if self._leadership is None else self._leadership.leader_url()

    async def _join_unless_replaced(self, session: aiohttp.ClientSession, url: str) -> None:
        """Join this leader. A leader that hangs takes the connection and says nothing: a candidate does not wait for it once
        the database names another one. Always LinkLost.
        """
        joining = asyncio.ensure_future(self._join(session, url))
        try:
            while self._welcome is None and not joining.done():
                if self._leader_by_database() not in (None, url):
                    raise LinkLost("the database names another leader")
                await asyncio.wait([joining], timeout=LOOK_S)
            await joining
        finally:
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)

    async def _join(self, session: aiohttp.ClientSession, url: str) -> None:
        """Be the agent of this leader until the connection ends: always LinkLost."""
        address = self._own_url if url == self._url else url
        socket = await connect(session, address, self.node, VERSION, self._fleet_key)
        try:
            # What is announced must be on the disk.
            while not self._is_idle.is_set():
                await self._is_idle.wait()
            self._link = link = LeaderLink(socket)
            self._leader_url = url
            self._do(self._custody.tick(self._now()))
            is_candidate = self._leadership is not None
            link.send(self._custody.announce(self._url, VERSION, is_candidate, self._inventory()))
            self._live.ring_at(self._custody.next_due_at())
            await link.run(self._take)
        finally:
            self._link = self._welcome = self._leader_url = None
            self._custody.disconnected()
            await socket.close()

    def _inventory(self) -> tuple[InventoryGpu, ...] | None:
        readings = self._sampler.snapshot.readings
        return tuple(map(as_installed, readings)) if readings else None

    def _take(self, message: LeaderMessage) -> None:
        actions = self._custody.take(message, self._now())
        if isinstance(message, Welcome) and self._custody.is_welcome:
            self._welcome = message
            self.pool_id = message.pool_id
            self._search.joined(self._leader_url or "")
            self._boxes = {}
            self._learn(message.boxes)
            self._said = None
            logger.info("the leader at %s has taken this box (epoch %d)", self._leader_url, message.epoch)
        elif isinstance(message, Orders) and (message.boxes is not None or message.forgotten):
            self._learn(message.boxes or (), message.forgotten)
        self._do(actions)

    def _learn(self, boxes: Sequence[tuple[str, str]], forgotten: Sequence[str] = ()) -> None:
        for node in forgotten:
            self._boxes.pop(node, None)
        self._boxes.update(boxes)
        self._search.learn(url for url in self._boxes.values() if url != self._url)

    def _say_trouble(self) -> None:
        if self._search.trouble != self._said:
            self._said = self._search.trouble
            logger.warning("this box has no leader: %s", self._said)

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

    async def _write(self, actions: Sequence[CustodyAction]) -> None:
        while True:
            try:
                await self._store.write(actions, self.pool_id)
            except JournalError as error:
                logger.error("this box cannot keep its leases, and takes none until that is fixed: %s", error)  # noqa: TRY400
                await asyncio.sleep(WRITE_AGAIN_S)
            else:
                return

    def _carry_out(self, part: Sequence[tuple[CustodyAction, LeaderLink | None]]) -> None:
        if any(isinstance(action, Keep | Drop | NoteOver) for action, _ in part):
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
                    link.close(why)
