"""What every journal promises, as tests: a journal's own test module subclasses this and provides the fixture `opens`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.ledger.journal import History, Journal, JournalError
from tests.ledger import examples
from tests.ledger.examples import ENDED, EVENTS, ended, note, numbers

# Opens the one journal of the test, anew each time; it was closed before.
Opens = Callable[[], Journal]

# The journal of a test serves all examples, and several classes inherit the tests.
UNCHECKED = [HealthCheck.function_scoped_fixture, HealthCheck.differing_executors]


class JournalContract:
    """Tests over the fixture `opens`."""

    @pytest.fixture
    def journal(self, opens: Opens) -> Iterator[Journal]:
        with closing(opens()) as journal:
            yield journal

    # Keeping

    def test_every_kind_of_event_comes_back_exactly_after_closing(self, opens: Opens) -> None:
        with closing(opens()) as journal:
            journal.append(EVENTS, [ENDED])
        with closing(opens()) as journal:
            history = journal.load(10)
        assert history == History(EVENTS, (ENDED,))
        assert repr(history) == repr(History(EVENTS, (ENDED,)))  # what equality leaves out: Holder.process

    @settings(max_examples=25, suppress_health_check=UNCHECKED, deadline=None)
    @given(st.lists(examples.events, max_size=4), st.lists(examples.ended_leases, max_size=3))
    def test_whatever_can_happen_comes_back_exactly(
        self, opens: Opens, events: list[ev.DurableEvent], leases: list[EndedLease]
    ) -> None:
        with closing(opens()) as journal:
            before = journal.load(10_000)
            journal.append(events, leases)
        with closing(opens()) as journal:
            after = journal.load(10_000)
        assert repr(after.events) == repr((*before.events, *events))
        latest = {(lease.id, lease.requested_at): repr(lease) for lease in (*before.ended, *leases)}
        assert {(lease.id, lease.requested_at): repr(lease) for lease in after.ended} == latest

    def test_what_is_loaded_does_not_change_with_the_journal(self, journal: Journal) -> None:
        journal.append([note(1)], [ended("a")])
        history = journal.load(10)
        journal.append([note(2)], [ended("b")])
        assert history == History((note(1),), (ended("a"),))

    @pytest.mark.parametrize("how", ["append", "compact"])
    def test_where_one_event_does_not_belong_here_nothing_is_written(self, journal: Journal, how: str) -> None:
        journal.append([note(1)], [ended("a")])
        events = [note(2), ev.GpusObserved(3.0, ()), note(4)]
        more = ([ended("b")],) if how == "append" else ()
        with pytest.raises(ValueError, match="not a durable event"):
            getattr(journal, how)(events, *more)
        assert journal.load(10) == History((note(1),), (ended("a"),))
        assert journal.events_since_compaction == 1

    # Ended leases

    def test_ended_leases_come_oldest_first_and_only_the_last_so_many(self, journal: Journal) -> None:
        journal.append([note(1)], [ended("a"), ended("b")])
        journal.append((), [ended("c")])
        assert [lease.id for lease in journal.load(10).ended] == ["a", "b", "c"]
        assert [lease.id for lease in journal.load(2).ended] == ["b", "c"]
        assert journal.load(0).ended == ()

    def test_the_order_of_ended_leases_is_that_of_writing_though_the_clock_was_set_back(self, journal: Journal) -> None:
        journal.append((), [ended("a", ended_at=900.0)])
        journal.append((), [ended("b", ended_at=100.0)])
        assert [lease.id for lease in journal.load(1).ended] == ["b"]

    def test_an_id_that_is_used_again_does_not_take_the_record_of_its_former_lease(self, journal: Journal) -> None:
        again = replace(ended("a"), requested_at=ENDED.requested_at + 1)
        journal.append((), [ended("a")])
        journal.append((), [again])
        assert journal.load(10).ended == (ended("a"), again)

    def test_an_ended_lease_that_is_there_is_replaced_and_counts_as_the_latest(self, journal: Journal) -> None:
        journal.append((), [ended("a"), ended("b")])
        journal.append((), [ended("a", ended_at=7.0)])
        assert journal.load(10).ended == (ended("b"), ended("a", ended_at=7.0))

    # Compaction

    def test_compaction_puts_the_new_events_in_the_place_of_all(self, opens: Opens) -> None:
        with closing(opens()) as journal:
            journal.append([note(number) for number in range(20)], [ended("a")])
            journal.compact([note(100), note(101), note(102)])
            assert numbers(journal.load(10).events) == [100, 101, 102]
        with closing(opens()) as journal:
            assert numbers(journal.load(10).events) == [100, 101, 102]
            assert journal.load(10).ended == (ended("a"),)

    def test_appending_goes_on_after_compaction(self, opens: Opens) -> None:
        with closing(opens()) as journal:
            journal.append([note(1), note(2)], ())
            journal.compact([note(3)])
            journal.append([note(4)], ())
        with closing(opens()) as journal:
            journal.append([note(5)], ())
            journal.compact([note(6), *EVENTS])
            journal.append([note(7)], ())
            assert journal.load(0).events == (note(6), *EVENTS, note(7))

    def test_it_can_be_compacted_to_nothing(self, journal: Journal) -> None:
        journal.append([note(1)], ())
        journal.compact(())
        assert journal.load(0).events == ()
        journal.append([note(2)], ())
        assert numbers(journal.load(0).events) == [2]

    def test_events_since_compaction_are_counted_through_closing(self, opens: Opens) -> None:
        with closing(opens()) as journal:
            journal.append([note(1), note(2)], [ended("a")])
            assert journal.events_since_compaction == 2
        with closing(opens()) as journal:
            journal.load(10)
            assert journal.events_since_compaction == 2
            # What compaction itself writes does not count, whatever is in it and in which order.
            journal.compact([*EVENTS, ev.HistoryCondensed(1.0, (), 1), *EVENTS])
            assert journal.events_since_compaction == 0
        with closing(opens()) as journal:
            assert journal.events_since_compaction == 0
            journal.append([note(3)], ())
            journal.append([note(4), note(5)], ())
        with closing(opens()) as journal:
            assert journal.events_since_compaction == 3

    # The end

    def test_closing_twice_is_harmless(self, journal: Journal) -> None:
        journal.close()
        journal.close()

    def test_a_closed_one_takes_nothing(self, opens: Opens) -> None:
        journal = opens()
        journal.append([note(1)], ())
        journal.close()
        with pytest.raises(JournalError, match="closed"):
            journal.append([note(2)], ())
        with pytest.raises(JournalError, match="closed"):
            journal.compact([note(2)])
        with closing(opens()) as again:
            assert numbers(again.load(0).events) == [1]


class ReplacementContract(JournalContract):
    """The same, for a journal that replaces itself if it is damaged."""

    def test_beginning_anew_leaves_the_given_events_only(self, opens: Opens) -> None:
        with closing(opens()) as journal:
            pool_id = journal.pool_id
            journal.append([note(1)], [ended("a")])
            journal.replace_damaged([note(2), note(3)])
            assert journal.load(10) == History((note(2), note(3)))
            assert journal.events_since_compaction == 0
            journal.append([note(4)], [ended("b")])
        with closing(opens()) as journal:
            assert len(journal.pool_id) == 16
            assert journal.pool_id == pool_id, "the pool is the same"
            assert journal.load(10) == History((note(2), note(3), note(4)), (ended("b"),))
            assert journal.events_since_compaction == 1

    def test_nothing_is_replaced_by_events_of_which_one_does_not_belong_here(self, journal: Journal) -> None:
        journal.append([note(1)], [ended("a")])
        with pytest.raises(ValueError, match="not a durable event"):
            journal.replace_damaged([note(2), ev.GpusObserved(3.0, ()), note(4)])  # type: ignore[list-item]
        assert journal.load(10) == History((note(1),), (ended("a"),))
        assert journal.events_since_compaction == 1

    def test_a_closed_one_is_not_replaced(self, journal: Journal) -> None:
        journal.append([note(1)], ())
        journal.close()
        with pytest.raises(JournalError, match="closed"):
            journal.replace_damaged([note(2)])
