"""What a leader wrote, or what became of it, may be known only when it leads no more, or leads again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from gpu_worker_pool.core.decider.condense import condense
from gpu_worker_pool.core.fleet.election import Election, Leadership
from gpu_worker_pool.core.fleet.following import Following
from gpu_worker_pool.core.fleet.leadership import JournalEnd, LeaderRow
from gpu_worker_pool.core.model.events import Configured, DurableEvent
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.ledger.fleet_writer import FleetWriter
from gpu_worker_pool.ledger.journal import JournalError, OutcomeUnknown
from gpu_worker_pool.ledger.outbox import WriteBatch
from gpu_worker_pool.ledger.postgres.database import PostgresDatabase


def ignored(at: float, name: str) -> Configured:
    return Configured(at, "ignored_processes", (name,), "ada")


class SlowDatabase:
    """Answers an append when it is told to; None refuses it. A snapshot is written when it is told to."""

    def __init__(self) -> None:
        self.was_asked = asyncio.Event()
        self.snapshot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.answer: asyncio.Future[JournalEnd | None] = asyncio.get_running_loop().create_future()

    async def append(self, *given: object) -> JournalEnd | None:
        self.was_asked.set()
        return await self.answer

    async def write_snapshot(self, *given: object) -> None:
        await self.snapshot

    async def read_leader(self) -> LeaderRow:
        return LeaderRow(9, "another", "other", "http://other", JournalEnd(5, 5), None, 3.0, 1.7e9)


class Leader:
    """A leader whose append is on its way."""

    def __init__(self) -> None:
        self.database = SlowDatabase()
        self.election = Election(lambda: "mine")
        self.election.leadership = Leadership(1, "mine", trusted_until=100.0, is_open=True)
        self.following = Following()
        self.following.loaded(None)
        self.stepped_down: list[str] = []
        self.failures: list[JournalError] = []
        self.reported: list[Sequence[DurableEvent]] = []
        database = cast("PostgresDatabase", self.database)
        self.writer = FleetWriter(database, self.election, self.following, lambda: 1.0, self.stepped_down.append)

    async def send(self, snapshot: list[DurableEvent] | None = None) -> None:
        batch = WriteBatch(events=[ignored(1.0, "a"), ignored(2.0, "b")])
        batch.snapshot = snapshot
        self.writer.write(batch, self.report)
        await self.database.was_asked.wait()

    def report(self, batch: WriteBatch, error: JournalError | None) -> None:
        if error is None:
            self.reported.append(batch.events)
        else:
            self.failures.append(error)

    async def fail(self, error: JournalError) -> None:
        self.database.answer.set_exception(error)
        await self.writer.finish(10.0)

    async def hear(self, answer: JournalEnd | None) -> None:
        self.database.answer.set_result(answer)
        await self.writer.finish(10.0)


@pytest.mark.parametrize("leads_again", [False, True])
async def test_an_answer_that_comes_after_the_leadership_changes_nothing(leads_again: bool) -> None:
    """The pool was dropped and is being read from the journal: it does not have what the position would say."""
    leader = Leader()
    await leader.send()

    leader.election.leadership = Leadership(9, "again", trusted_until=100.0) if leads_again else None
    leader.following.reload("it led before")
    leader.following.loaded(None)
    await leader.hear(JournalEnd(2, 7))

    assert leader.following.end.position == 0
    assert not leader.reported


async def test_a_refusal_of_an_old_append_does_not_end_a_new_leadership() -> None:
    leader = Leader()
    await leader.send()

    leader.election.leadership = Leadership(9, "again", trusted_until=100.0)
    await leader.hear(None)

    assert not leader.stepped_down


async def test_a_failure_that_wrote_nothing_is_reported() -> None:
    """A full disk, for example: the leader goes on, and its callers are told."""
    leader = Leader()
    await leader.send()
    error = JournalError("the disk is full")

    await leader.fail(error)

    assert leader.failures == [error]
    assert leader.following.end.position == 0
    assert not leader.stepped_down


async def test_what_became_of_a_lost_answer_is_found_out() -> None:
    leader = Leader()
    await leader.send()

    await leader.fail(OutcomeUnknown("the answer was lost"))

    assert not leader.failures
    assert leader.stepped_down == ["other leads in epoch 9"]


async def test_while_a_snapshot_is_being_written_no_other_is_due() -> None:
    """To make one takes long in a large pool, and every batch that is written meanwhile would make another."""
    leader = Leader()
    leader.following.snapshot_every = 1
    await leader.send(snapshot=condense(PoolState()))
    await leader.hear(JournalEnd(2, 7))
    await asyncio.sleep(0)
    assert not leader.writer.is_compaction_due(0)

    leader.database.snapshot.set_exception(JournalError("the disk is full"))
    while not leader.writer.is_compaction_due(0):  # noqa: ASYNC110 - the history is made in a thread
        await asyncio.sleep(0)
