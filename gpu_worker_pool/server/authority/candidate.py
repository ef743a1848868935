"""A candidate of a fleet: takes part in the election, follows the journal, and leads the pool while it is elected.

What to do is decided in core/fleet; here it is carried out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from gpu_worker_pool.core.fleet.election import (
    ClaimLeadership,
    Election,
    ElectionAction,
    ElectionPace,
    ElectionQuestion,
    HandOverLeadership,
    LeadershipLost,
    LeadershipWon,
    ReadLeader,
    RenewLeadership,
)
from gpu_worker_pool.core.fleet.leadership import LeaderRow, has_lost_commits, why_lost
from gpu_worker_pool.core.model.events import Event, TakenOver
from gpu_worker_pool.ledger.fleet_writer import FleetWriter
from gpu_worker_pool.ledger.journal import JournalError
from gpu_worker_pool.server.leader.fleet_leader import FleetLeader
from gpu_worker_pool.wire.service import FleetView

from .journal_follower import JournalFollower
from .journal_sources import LeadingSource
from .pool import Pool

if TYPE_CHECKING:
    from gpu_worker_pool.ledger.postgres.database import PostgresDatabase

logger = logging.getLogger(__name__)

# The last batch of a leader that stops has this long to be written.
FINISH_S = 2.0
OPEN_AGAIN_S = 1.0
# How long a server that starts waits until it is known who leads.
FIRST_S = 5.0


class Candidate(LeadingSource):
    """It also tells the agent of its box who leads: the database says so."""

    def __init__(
        self,
        pool: Pool,
        leader: FleetLeader,
        database: PostgresDatabase,
        clock: Callable[[], float],
        *,
        node: str,
        url: str,
        spread_s: float,
    ) -> None:
        self._pool, self._leader = pool, leader
        self._database = database
        self._clock = clock
        self._node = node
        self._url = url
        self.election = Election(lambda: str(uuid4()), ElectionPace(spread_s=spread_s))
        self._journal = JournalFollower(database, pool.state.settings, self._followed)
        self._writer: FleetWriter | None = None
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: asyncio.Task[None] | None = None
        self._catching_up: asyncio.Task[None] | None = None
        self._trouble: str | None = None
        # Why the journal could not be read, the last time that was tried.
        self._why_unread: str | None = None
        self._is_settled = asyncio.Event()
        # When the journal was last read to the end that it then had.
        self._caught_up_at: float | None = None

    async def start(self) -> None:
        """Begin, and wait for a while until it is known who leads."""
        self._pool.follow(self._note)
        self._keep_running()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_settled.wait(), FIRST_S)

    def view(self) -> FleetView:
        """The fleet as this candidate knows it."""
        now, row = self._clock(), self.election.row
        leads = self.election.may_act(now)
        is_led = row is not None and now < self.election.heard_at + row.expires_in_s
        is_led = is_led and (leads or self._is_another(row))
        lag_s = 0.0 if leads else None if self._caught_up_at is None else round(now - self._caught_up_at, 3)
        return FleetView(
            id=self._database.pool_id or None,
            role="leader" if leads else "follower",
            epoch=row.epoch if row is not None else None,
            leader=row.holder if row is not None and is_led else None,
            leader_url=row.url if row is not None and is_led else None,
            lag_s=lag_s,
            trouble=self._why_unread or self._trouble,
        )

    async def stop(self) -> None:
        """Hand the leadership over, so that the next leader need not wait for its end."""
        self.election.retire()
        if self._writer is not None:
            await self._writer.finish(FINISH_S)
        for action in self.election.stop():
            if isinstance(action, HandOverLeadership):
                await self._hand_over(action)
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._database.close()

    def stand_back(self) -> None:
        """Claim nothing for a while: a leader that lives has another key."""
        self.election.stand_back(self._clock())

    def leader_url(self) -> str | None:
        return self.view().leader_url

    def lead_later_epoch(self, epoch_seen: int) -> None:
        reason = (
            f"a box has seen epoch {epoch_seen}, so the database was put back; this server leads again in a later epoch"
        )
        self._carry_out(self.election.lead_later_epoch(epoch_seen, reason, self._clock()))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A fault of this program. Without the election, the other candidates go on.
            logger.error("this candidate failed", exc_info=error)
            # Not the error's text, which might quote a password.
            why = f"this server failed ({type(error).__name__}); its log says more"
            self._step_down(why)
            self._say_trouble(why)
            if task is self._running:
                asyncio.get_running_loop().call_later(OPEN_AGAIN_S, self._keep_running)

    def _keep_running(self) -> None:
        if not self.election.is_stopped:
            self._running = self._begin(self._run())

    async def _run(self) -> None:
        await self._open_database()
        while True:
            self._carry_out(self.election.wake(self._clock()))
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(self.election.wake_at - self._clock(), 0.0)):
                    await self._wake.wait()

    async def _open_database(self) -> None:
        while True:
            try:
                await self._database.open()
            except JournalError as error:
                self._say_trouble(str(error))
                await asyncio.sleep(OPEN_AGAIN_S)
            else:
                self._trouble = None
                return

    def _carry_out(self, actions: Sequence[ElectionAction]) -> None:
        for action in actions:
            match action:
                case ReadLeader() | ClaimLeadership() | RenewLeadership():
                    self._begin(self._ask(action))
                case LeadershipWon():
                    self._begin_to_catch_up(action.row, action)
                case LeadershipLost(reason=reason):
                    self._lose(reason)
                case HandOverLeadership():
                    self._begin(self._hand_over(action))
        self._wake.set()

    async def _ask(self, question: ElectionQuestion) -> None:
        end = self._journal.following.end
        try:
            row = await self._answer(question)
        except JournalError as error:
            self._say_trouble(str(error))
            self.election.failed(question, self._clock())
            self._wake.set()
            return
        self._trouble = None
        self._carry_out(self.election.answered(question, row, self._clock()))
        mine = self.election.leadership
        if row is None:
            return
        if mine is None:
            self._begin_to_catch_up(row, None)
        elif self._writer is not None and has_lost_commits(row, mine.epoch, mine.term, end):
            self._step_down(why_lost(row.end, end))

    async def _answer(self, question: ElectionQuestion) -> LeaderRow | None:
        match question:
            case ClaimLeadership(term=term, seen_epoch=seen_epoch):
                return await self._database.claim(term, self._node, self._url, seen_epoch)
            case RenewLeadership(epoch=epoch, term=term):
                return await self._database.renew(epoch, term)
            case _:
                return await self._database.read_leader()

    def _say_trouble(self, why: str) -> None:
        if why != self._trouble:
            logger.error("the database of the fleet: %s", why)
        self._trouble = why
        if self.election.leadership is None:
            self._pool.say_trouble(f"no leader at the moment; waiting ({why})")
            self._is_settled.set()

    def _say_unread(self, why: str) -> None:
        if why != self._why_unread:
            logger.error("the journal of the fleet cannot be read: %s", why)
        self._why_unread = self._trouble = why
        self._say_trouble(why)

    def _begin_to_catch_up(self, row: LeaderRow, won: LeadershipWon | None) -> None:
        """Read what the journal has. A follower that does so already is not disturbed; a new leader is."""
        if self._catching_up is not None and not self._catching_up.done():
            if won is None:
                return
            self._catching_up.cancel()
        work = self._follow(row) if won is None else self._take_over(won, self._catching_up)
        self._catching_up = self._begin(work)

    async def _follow(self, row: LeaderRow) -> None:
        began = self._clock()
        try:
            await self._journal.catch_up(row)
            self._caught_up_at, self._why_unread = began, None
            await self._journal.write_snapshot_if_due()
        except JournalError as error:
            self._say_unread(str(error))
            return
        if self.election.leadership is None:
            self._show(row, ())
            if row.expires_in_s > 0:
                self._is_settled.set()

    async def _take_over(self, won: LeadershipWon, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        try:
            await self._journal.catch_up(won.row)
            self._lead(won)
        except JournalError as error:
            self._say_unread(str(error))
            self._carry_out(self.election.fail_to_lead(won.epoch, won.term, str(error), self._clock()))

    def _lead(self, won: LeadershipWon) -> None:
        def may_act() -> bool:
            return self.election.may_act(self._clock())

        self._writer = writer = FleetWriter(
            self._database, self.election, self._journal.following, self._clock, self._step_down
        )
        logger.warning("this server leads the fleet from now on (epoch %d)", won.epoch)
        self._pool.lead(
            self._journal.state,
            writer,
            pool_id=self._database.pool_id,
            epoch=won.epoch,
            # The database's, by the boot clock: a leader after this one goes on with it.
            wall_clock=lambda: won.row.wall_now + self._clock() - won.heard_at,
            may_act=may_act,
        )

    def _followed(self, row: LeaderRow, events: Sequence[Event]) -> None:
        self.election.see_epoch(self._journal.following.epoch)
        self._show(row, events)

    def _show(self, row: LeaderRow, events: Sequence[Event]) -> None:
        if not self._is_another(row):
            row = replace(row, expires_in_s=0.0)  # what is left of this server's own leadership
        self._pool.show(self._journal.state, row, events, pool_id=self._database.pool_id)

    def _is_another(self, row: LeaderRow | None) -> bool:
        return row is not None and row.url != self._url

    def _note(self, events: Sequence[Event]) -> None:
        """Once the TakenOver of this leader is written, it answers callers."""
        mine = self.election.leadership
        if mine is not None and any(isinstance(each, TakenOver) and each.epoch == mine.epoch for each in events):
            self.election.open(mine.epoch, mine.term)
            self._is_settled.set()

    def _step_down(self, why: str) -> None:
        mine = self.election.leadership
        if mine is not None:
            self._carry_out(self.election.step_down(mine.epoch, mine.term, why, self._clock()))

    def _lose(self, reason: str) -> None:
        logger.warning("this server no longer leads the fleet: %s", reason)
        trouble = self._trouble
        if self._writer is not None:
            trouble = self._writer.trouble or trouble
            self._writer.close()
            self._writer = None
        if self._catching_up is not None:
            self._catching_up.cancel()
        self._caught_up_at = self._clock()
        # What is not written may be in this state.
        self._journal.following.reload("this server led before")
        why = f"{reason}: {trouble}" if trouble else reason
        self._pool.step_down(f"this server no longer leads the fleet: {why}")

    async def _hand_over(self, action: HandOverLeadership) -> None:
        try:
            await self._database.hand_over(action.epoch, action.term)
        except JournalError as error:
            logger.warning("the leadership could not be handed over, and ends by itself: %s", error)
