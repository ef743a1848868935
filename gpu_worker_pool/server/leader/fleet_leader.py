"""The boxes of the fleet that this server leads: tells them what was written, and carries out what their agents say.

What to do is decided in core/fleet/boxes.py; here it is carried out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from math import inf

from gpu_worker_pool.core.fleet.box_actions import BoxAction, Close, Confirmed, Do, NeverKept, Outdated, Tell
from gpu_worker_pool.core.fleet.boxes import Boxes, BoxInfo
from gpu_worker_pool.core.fleet.messages import AgentMessage, LeaderMessage, Orders
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.ledger.driver import Driver
from gpu_worker_pool.ledger.loop import Waiters
from gpu_worker_pool.server.agent.frames import encode_message
from gpu_worker_pool.server.agent.link import BoxLink

logger = logging.getLogger(__name__)

NO_BOXES: Mapping[str, BoxInfo] = {}


class FleetLeader:
    """It leads from `begin` to `end`. `sessions` are the agents that are connected. `on_never_kept` is called with each grant
    that a box turns out not to have, `on_outdated` with the epoch that a box has seen, if that is above the leader's.
    """

    def __init__(
        self, driver: Driver, on_never_kept: Callable[[str], None], on_outdated: Callable[[int], None]
    ) -> None:
        self._driver = driver
        self._on_never_kept = on_never_kept
        self._on_outdated = on_outdated
        self._boxes: Boxes | None = None
        self.sessions: dict[int, BoxLink] = {}
        self._numbers = count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = inf
        self._waiters = Waiters()
        self._is_stopping = False
        self._last: tuple[LeaderMessage | None, str] = (None, "")
        driver.listeners.append(self._written)

    @property
    def is_leading(self) -> bool:
        """Whether this server leads now, and is sure of it."""
        return self._boxes is not None and self._driver.is_leading

    @property
    def boxes(self) -> Mapping[str, BoxInfo]:
        """The boxes that have announced themselves to this leader."""
        return NO_BOXES if self._boxes is None else self._boxes.boxes

    def link_to(self, node: str) -> BoxLink | None:
        """The link of the agent of this node; None if it has not joined."""
        number = None if self._boxes is None else self._boxes.session_of(node)
        return None if number is None else self.sessions.get(number)

    def begin(self, epoch: int, pool_id: str) -> None:
        self._boxes = Boxes(epoch, pool_id)

    def end(self, why: str) -> None:
        """Lead no more: the agents look for another leader."""
        self._boxes = None
        self._set_timer()
        self._waiters.release_all()
        sessions, self.sessions = self.sessions, {}
        for session in sessions.values():
            session.close(why)

    def add(self, session: BoxLink) -> int:
        """Take a connection; return its number."""
        number = next(self._numbers)
        self.sessions[number] = session
        return number

    def remove(self, number: int) -> None:
        """The connection is gone."""
        if self.sessions.pop(number, None) is not None and self._boxes is not None:
            self._carry_out(self._boxes.closed(number, self._driver.now()))

    def receive(self, number: int, message: AgentMessage) -> None:
        if self._boxes is not None and number in self.sessions:
            self._carry_out(self._boxes.receive(number, message, self._driver.state, self._driver.now()))

    def is_confirmed(self, lease_id: str) -> bool:
        """Whether all boxes of a grant have it on their disks."""
        return self._boxes is not None and self._boxes.is_confirmed(lease_id)

    async def confirmed(self, lease_id: str, timeout_s: float) -> bool:
        """Wait until all boxes of a grant have it; whether that was in time."""
        until = self._driver.now() + timeout_s
        while not self.is_confirmed(lease_id) and not self._is_stopping and (left_s := until - self._driver.now()) > 0:
            await self._waiters.wait((lease_id,), left_s)
        return self.is_confirmed(lease_id)

    def release_waiters(self) -> None:
        """End all waits with what is known so far: this server is about to stop."""
        self._is_stopping = True
        self._waiters.release_all()

    def _written(self, events: Sequence[ev.Event]) -> None:
        if self._boxes is not None and self._driver.is_in_charge:
            self._carry_out(self._boxes.written(events, self._driver.state, self._driver.now()))
            for event in events:
                if isinstance(event, ev.LeaseEnded | ev.GrantWithdrawn):
                    self._waiters.tell(event.lease_id)

    def _carry_out(self, actions: Sequence[BoxAction]) -> None:
        for action in actions:
            match action:
                case Tell(session=number, message=message):
                    if (session := self.sessions.get(number)) is not None:
                        session.tell(self._encoded(message))
                case Do(command=command):
                    self._driver.note(command)
                case Close(session=number, why=why):
                    if (session := self.sessions.pop(number, None)) is not None:
                        logger.info("the connection of an agent is closed: %s", why)
                        session.close(why)
                case Confirmed(lease_id=lease_id):
                    self._waiters.tell(lease_id)
                case Outdated(epoch_seen=epoch_seen):
                    self._on_outdated(epoch_seen)
                    return  # it leads no more
                case NeverKept(lease_id=lease_id):
                    self._on_never_kept(lease_id)
        self._set_timer()

    def _encoded(self, message: LeaderMessage) -> str:
        """The same time goes to all boxes."""
        if self._last[0] is not message:
            text = encode_message(message)
            if not isinstance(message, Orders):
                return text
            self._last = message, text
        return self._last[1]

    def _set_timer(self) -> None:
        """Set it if something else is due: a thousand agents say every second that nothing has changed."""
        due_at = inf if self._boxes is None else self._boxes.next_due_at()
        if due_at == self._rings_at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._rings_at = due_at
        if due_at < inf:
            self._timer = asyncio.get_running_loop().call_later(max(due_at - self._driver.now(), 0.0), self._tick)

    def _tick(self) -> None:
        self._timer, self._rings_at = None, inf
        if self._boxes is not None:
            self._carry_out(self._boxes.tick(self._driver.state, self._driver.now()))
