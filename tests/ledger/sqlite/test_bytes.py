"""The journal does not grow with the size of what is written to it: it is bounded in bytes, not only in rows."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.ledger.outbox import BYTES_PER_LEASE, SMALLEST_TO_COMPACT, is_long
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from tests.ledger.examples import ENDED

LARGE = "x" * 1_000_000


def large(number: int) -> ev.Configured:
    return ev.Configured(float(number), "excluded", ENDED.gpus[0], LARGE)


def test_few_large_events_are_a_reason_to_compact_also_after_a_restart(path: Path) -> None:
    enough = SMALLEST_TO_COMPACT // len(LARGE) + 1
    with closing(SqliteJournal(path, durability="normal")) as journal:
        journal.append([large(1)], ())
        assert not is_long(journal, live=1)
        journal.append([large(number) for number in range(enough)], ())
        assert is_long(journal, live=1)
        assert not is_long(journal, live=journal.bytes_since_compaction // BYTES_PER_LEASE + 1), "much of it is alive"
        before = journal.bytes_since_compaction
    with closing(SqliteJournal(path, durability="normal")) as journal:
        assert journal.bytes_since_compaction == before
        journal.compact([large(1)])
        assert not is_long(journal, live=1)


def test_the_oldest_ended_leases_are_forgotten_when_the_file_is_too_large(path: Path) -> None:
    request = replace(ENDED.request, labels=(("note", "x" * 4000),))

    def ended(numbers: range) -> list[EndedLease]:
        return [replace(ENDED, id=f"lease{number}", request=request) for number in numbers]

    with closing(SqliteJournal(path, durability="normal", most_bytes=1_000_000)) as journal:
        journal.append((), ended(range(80)))
        journal.compact(())
        kept = [lease.id for lease in journal.load(1000).ended]
        assert len(kept) == 80, "there is room"
        journal.append((), ended(range(80, 400)))
        journal.compact(())
        kept = [lease.id for lease in journal.load(1000).ended]
        assert kept == [f"lease{number}" for number in range(100, 400)], "a quarter fewer, and the latest stay"
