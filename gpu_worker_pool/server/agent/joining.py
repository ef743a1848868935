"""A box as a part of its fleet: it finds the leader, joins it, and joins the next one when the link ends."""

from __future__ import annotations

import asyncio
import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from gpu_worker_pool.core.fleet.boxes import BoxInfo
from gpu_worker_pool.core.fleet.messages import Orders, Welcome
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.wire.service import FleetView

from .connect import Connector
from .handshake import FleetKey
from .leader_search import LOOK_S, LeaderSearch
from .link import NO_LEADER, BoxLink, LinkLost

logger = logging.getLogger(__name__)


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

    def link_to(self, node: str) -> BoxLink | None:
        """The link of the agent of this node, if this server leads and the agent has joined it."""

    @property
    def box_infos(self) -> Mapping[str, BoxInfo]:
        """What the leader knows of each box that announced itself to it; empty elsewhere."""


class Joining(ABC):
    """`url` is where other boxes reach this one, and `own_url` where this process reaches itself. `leadership` is None on
    a box that cannot lead: it asks the boxes that are `listed`.
    """

    def __init__(
        self,
        node: str,
        key: FleetKey,
        *,
        url: str,
        own_url: str,
        listed: Sequence[str],
        leadership: LeaderKnowledge | None,
        pool_id: str | None,
    ) -> None:
        self.node = node
        self.pool_id = pool_id
        self._url = url
        self._own_url = own_url
        self._connector = Connector(node, key)
        self._leadership = leadership
        self._search = LeaderSearch(listed, zlib.crc32(f"{node} {url}".encode()) % 1000 / 1000)
        self._has_joined = asyncio.Event()
        self._link: BoxLink | None = None
        self._leader_url: str | None = None
        self._welcome: Welcome | None = None
        self._boxes: dict[str, str] = {}
        self._said: str | None = None

    @abstractmethod
    async def _be_agent(self, link: BoxLink, leader_url: str) -> None:
        """Be the agent of this leader until the link ends: always LinkLost."""

    # --- what the server sees ----------------------------------------------------------------------------------------

    async def wait_until_joined(self, timeout_s: float) -> None:
        """Wait until a leader has taken this box, or until the timeout."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_joined.wait(), timeout_s)

    @property
    def is_leader(self) -> bool:
        """Whether this process leads now, and is sure of it."""
        return self._leadership is not None and self._leadership.is_leading

    @property
    def leader_url(self) -> str | None:
        """Where to pass calls on; None while no leader is known, or while it does not take this box."""
        if self.is_leader:
            return self._url
        # Connected to itself, it led and is not sure that it still does: to pass a call on to itself would only cost more.
        if self._welcome is None or self._link is None or self._link.node == self.node:
            return None
        return self._boxes.get(self._link.node, self._leader_url)

    @property
    def leader(self) -> BoxLink | None:
        """The link on which calls are passed on to the leader; None without one, and on the leader itself."""
        return self._link if self.leader_url is not None and not self.is_leader else None

    @property
    def trouble(self) -> str | None:
        """Why no call can be passed on, in a sentence; None if calls can be."""
        if self.is_leader or self.leader_url is not None:
            return None
        known = None if self._leadership is None else self._leadership.trouble
        if self._welcome is not None and known is None:
            return None
        is_known = self._welcome is not None or (known is not None and self._leader_by_database() is None)
        why = known if is_known else "; ".join(filter(None, (self._search.trouble, known)))
        if why is not None and why.startswith(NO_LEADER):
            return why
        return f"{NO_LEADER} ({why})" if why else NO_LEADER

    @property
    def why_waiting(self) -> str | None:
        """The same for callers, who can only wait; the rest is for operators (`gpu-pool fleet`, `gpu-pool doctor`)."""
        why = self.trouble
        return NO_LEADER if why is not None and why.startswith(NO_LEADER) else why

    @property
    def boxes(self) -> Mapping[str, str]:
        """The URL of each node of the fleet, as far as it is known."""
        return self._boxes

    @property
    def box_infos(self) -> Mapping[str, BoxInfo]:
        return {} if self._leadership is None else self._leadership.box_infos

    async def ask_box(self, node: str, target: str, body: bytes, timeout_s: float) -> bytes | None:
        """Ask another box: the leader by its link to it, and each other box by a link for this call alone. None if it does not
        answer.
        """
        link = None if self._leadership is None else self._leadership.link_to(node)
        if link is None:
            url = self._boxes.get(node)
            return None if url is None else await self._connector.ask_box(url, target, body, timeout_s)
        answer = link.ask("POST", target, body=body)
        try:
            async with asyncio.timeout(timeout_s):
                await answer.begun
        except (TimeoutError, LinkLost):
            return None
        finally:
            answer.end()
        return answer.whole

    def view(self) -> FleetView:
        """The fleet as a box that cannot lead knows it."""
        url, welcome = self.leader_url, self._welcome
        return FleetView(
            id=self.pool_id,
            role="agent",
            epoch=welcome.epoch if welcome is not None else None,
            leader=self._link.node if url is not None and self._link is not None else None,
            leader_url=url,
            lag_s=None,
            trouble=self.trouble,
        )

    # --- the link to the leader --------------------------------------------------------------------------------------

    async def _stay_joined(self) -> None:
        while True:
            step = self._search.next_step(boot_time(), self._leader_by_database())
            if isinstance(step, float):
                self._say_trouble()
                pause_s = max(step - boot_time(), 0.0)
                await asyncio.sleep(pause_s if self._leadership is None else min(pause_s, LOOK_S))
                continue
            try:
                await self._join_unless_replaced(step)
            except LinkLost as lost:
                self._search.parted(step, str(lost), boot_time(), leader=lost.leader, is_silent=lost.is_silent)
                if lost.has_other_key and self._leadership is not None:
                    self._leadership.stand_back()

    def _leader_by_database(self) -> str | None:
        return None if self._leadership is None else self._leadership.leader_url()

    async def _join_unless_replaced(self, url: str) -> None:
        """Join this leader. A leader that hangs takes the connection and says nothing: a candidate does not wait for it once
        the database names another one. Always LinkLost.
        """
        joining = asyncio.ensure_future(self._join(url))
        try:
            while self._welcome is None and not joining.done():
                if self._leader_by_database() not in (None, url):
                    raise LinkLost("the database names another leader")
                await asyncio.wait([joining], timeout=LOOK_S)
            await joining
        finally:
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)

    async def _join(self, url: str) -> None:
        link, socket = await self._connector.connect(self._own_url if url == self._url else url)
        try:
            await self._be_agent(link, url)
        finally:
            self._link = self._welcome = self._leader_url = None
            await socket.close()

    def _learn(self, message: Welcome | Orders) -> None:
        """Note what the leader says of the fleet."""
        if isinstance(message, Welcome):
            self._welcome, self.pool_id, self._said = message, message.pool_id, None
            self._has_joined.set()
            self._search.joined(self._leader_url or "")
            logger.info("the leader at %s has taken this box (epoch %d)", self._leader_url, message.epoch)
        if message.boxes is None:
            return
        self._boxes = dict(message.boxes)
        self._search.learn(url for url in self._boxes.values() if url != self._url)

    def _say_trouble(self) -> None:
        if self._search.trouble != self._said:
            self._said = self._search.trouble
            logger.warning("this box has no leader: %s", self._said)
