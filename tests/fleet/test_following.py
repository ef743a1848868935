"""Where a candidate is in the journal, and whether it is still the same journal."""

from __future__ import annotations

from gpu_worker_pool.core.fleet.following import Following, JournalTail, LoadSnapshot, ReadEvents
from gpu_worker_pool.core.fleet.leadership import JournalSnapshot, StoredEvent
from gpu_worker_pool.core.model.events import Configured


def stored(position: int, *, epoch: int = 1, name: str | None = None) -> StoredEvent:
    return StoredEvent(
        position, epoch, Configured(float(position), "ignored_processes", (name or f"event {position}",), "ada")
    )


def journal(first: int, last: int, *, epoch: int = 1) -> list[StoredEvent]:
    return [stored(position, epoch=epoch) for position in range(first, last + 1)]


def follower(position: int, *, most: int = 100) -> Following:
    """A candidate that has read the journal up to this position."""
    following = Following(JournalTail(most), snapshot_every=5)
    following.loaded(None)
    question = following.question(position)
    assert isinstance(question, ReadEvents)
    following.take(question, journal(1, position), position)
    return following


def test_a_candidate_begins_with_the_snapshot_and_what_comes_after_it() -> None:
    following = Following()
    assert isinstance(following.question(9), LoadSnapshot)
    following.loaded(JournalSnapshot(6, ()))

    question = following.question(9)
    assert question == ReadEvents(5, 1000)
    assert isinstance(question, ReadEvents)
    fresh = following.take(question, journal(6, 9), 9)

    assert [each.position for each in fresh] == [7, 8, 9]
    assert following.question(9) is None
    assert following.position == 9


def test_a_candidate_knows_the_event_of_its_snapshot_even_if_nothing_came_after_it() -> None:
    """Otherwise it could not tell that the journal went on differently."""
    following = Following()
    following.loaded(JournalSnapshot(6, ()))

    question = following.question(6)
    assert question == ReadEvents(5, 1000)
    assert isinstance(question, ReadEvents)
    assert following.take(question, journal(6, 6), 6) == ()
    assert following.question(6) is None


def test_the_last_known_event_is_read_again_and_not_applied_twice() -> None:
    following = follower(4)

    question = following.question(6)
    assert question == ReadEvents(3, 1000)
    assert isinstance(question, ReadEvents)

    assert [each.position for each in following.take(question, journal(4, 6), 6)] == [5, 6]


def test_events_that_were_pruned_are_loaded_from_a_snapshot() -> None:
    following = follower(4)
    question = following.question(20)
    assert isinstance(question, ReadEvents)

    assert following.take(question, journal(11, 20), 20) == ()

    assert isinstance(following.question(20), LoadSnapshot)
    assert following.position == 4


def test_events_after_a_gap_wait_for_the_next_question() -> None:
    following = follower(4)
    question = following.question(8)
    assert isinstance(question, ReadEvents)

    fresh = following.take(question, [stored(4), stored(5), stored(7), stored(8)], 8)

    assert [each.position for each in fresh] == [5]
    assert following.question(8) == ReadEvents(4, 1000)


def test_an_epoch_that_falls_is_not_believed() -> None:
    following = follower(4)
    question = following.question(6)
    assert isinstance(question, ReadEvents)

    assert following.take(question, [stored(4), stored(5, epoch=3), stored(6, epoch=2)], 6) == ()

    assert following.reload_because == "epoch 2 follows epoch 3 at position 6"


def test_a_journal_that_went_on_differently_is_noticed_at_the_next_event() -> None:
    following = follower(6)
    question = following.question(7)
    assert isinstance(question, ReadEvents)

    assert following.take(question, [stored(6, epoch=2, name="other"), stored(7, epoch=2)], 7) == ()

    assert isinstance(following.question(7), LoadSnapshot)
    assert following.missing(6) == ()  # what it knew is not written again


def test_the_same_events_under_a_newer_epoch_were_repaired() -> None:
    following = follower(6)
    question = following.question(7)
    assert isinstance(question, ReadEvents)

    assert following.take(question, [stored(6, epoch=2), stored(7, epoch=2)], 7) == (stored(7, epoch=2),)


def test_a_candidate_that_knows_more_than_the_journal_has_what_is_missing() -> None:
    following = follower(6)
    following.doubt()

    question = following.question(4, must_match=True)
    assert question == ReadEvents(3, 1)
    assert isinstance(question, ReadEvents)
    assert following.take(question, [stored(4)], 4) == ()

    assert following.question(4, must_match=True) is None
    assert following.missing(4) == (stored(5), stored(6))


def test_nothing_is_repaired_on_top_of_another_history() -> None:
    following = follower(6)
    following.doubt()
    question = following.question(4, must_match=True)
    assert isinstance(question, ReadEvents)

    following.take(question, [stored(4, epoch=2, name="other")], 4)

    assert isinstance(following.question(4, must_match=True), LoadSnapshot)
    assert following.missing(4) == ()


def test_what_was_written_is_remembered_also_after_a_reload() -> None:
    """A leader that stepped down drops its pool, and not what it knows to have been written."""
    following = follower(4)
    following.written(6, 2, journal(5, 6, epoch=2))
    following.reload("the leadership was lost")
    following.loaded(JournalSnapshot(3, ()))
    question = following.question(4, must_match=True)
    assert isinstance(question, ReadEvents)
    following.take(question, journal(3, 4), 4)

    assert following.missing(4) == tuple(journal(5, 6, epoch=2))


def test_more_than_is_remembered_cannot_be_repaired() -> None:
    following = follower(8, most=3)

    assert following.missing(5) == tuple(journal(6, 8))
    assert following.missing(4) is None
    following.forget("too much is missing")
    assert following.missing(4) == ()
    assert isinstance(following.question(4), LoadSnapshot)


def test_an_empty_journal_that_was_full_is_repaired_from_the_beginning() -> None:
    following = follower(3)
    following.doubt()

    assert following.question(0, must_match=True) is None
    assert following.missing(0) == tuple(journal(1, 3))


def test_a_follower_writes_snapshots_and_the_leader_only_if_they_are_twice_overdue() -> None:
    assert not follower(4).is_snapshot_due(4, is_leader=False)
    assert follower(5).is_snapshot_due(5, is_leader=False)
    assert not follower(9).is_snapshot_due(9, is_leader=True)
    assert follower(10).is_snapshot_due(10, is_leader=True)

    following = follower(6)
    following.snapshot_known(6)
    assert not following.is_snapshot_due(6, is_leader=False)


def test_no_snapshot_is_written_of_what_the_journal_may_not_have() -> None:
    following = follower(8)
    assert not following.is_snapshot_due(7, is_leader=False)

    following.doubt()
    assert not following.is_snapshot_due(8, is_leader=False)


def test_no_snapshot_is_written_of_a_pool_that_is_to_be_dropped() -> None:
    following = follower(8)
    following.reload("the leadership was lost")

    assert not following.is_snapshot_due(8, is_leader=False)


def test_it_is_noticed_that_the_journal_went_on_without_known_events() -> None:
    following = follower(4)
    following.reload("this server led before")
    following.loaded(None)
    question = following.question(3)
    assert isinstance(question, ReadEvents)

    following.take(question, [*journal(1, 2), stored(3, epoch=2, name="another")], 3)

    assert following.gone == 2
