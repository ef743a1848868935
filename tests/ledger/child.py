"""A process that opens a journal, to be killed, locked out or starved by the tests: `python -m tests.ledger.child`.

It says one line of JSON for each thing it has done, so that a test knows what was acknowledged.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from gpu_worker_pool.ledger.journal import JournalError
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from tests.ledger.examples import ended, note

BATCH = 3
COMPACTED = [note(number) for number in range(1000, 1010)]


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)  # noqa: T201


def write(path: Path) -> None:
    """Batch after batch, with a compaction after the fourth."""
    journal = SqliteJournal(path)
    say(opened=True)
    for number in range(8):
        first = number * BATCH
        journal.append([note(first + offset) for offset in range(BATCH)], [ended(f"lease{number}")])
        say(appended=number)
        if number == 3:
            journal.compact(COMPACTED)
            say(compacted=True)
    journal.close()
    say(closed=True)


def hold(path: Path) -> None:
    """Until standard input ends."""
    journal = SqliteJournal(path)
    say(pid=os.getpid())
    sys.stdin.read()
    journal.close()


def hold_with_children(path: Path) -> None:
    """As `hold`, and with a program and a fork that live on until standard input ends."""
    journal = SqliteJournal(path)
    program = subprocess.Popen(["cat"], stdout=subprocess.DEVNULL, close_fds=False)  # noqa: S607
    if not os.fork():
        say(forked=os.getpid(), program=program.pid)
        sys.stdin.read()
        os._exit(0)
    sys.stdin.read()
    journal.close()


def starve(path: Path) -> None:
    """Meets a limit on the size of files in the middle of writing, and goes on once it is lifted."""
    journal = SqliteJournal(path)
    journal.append([note(1)], [ended("a")])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = Path(f"{path}-wal").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, hard))
    attempts: list[Callable[[], None]] = [
        lambda: journal.append([note(2), note(3)], [ended("b")]),
        lambda: journal.append([note(2), note(3)], [ended("b")]),
        lambda: journal.compact(COMPACTED),
        lambda: journal.replace_damaged([note(number) for number in range(2000)]),
    ]
    for attempt in attempts:
        try:
            attempt()
        except JournalError as error:
            say(failed=str(error), kind=type(error).__name__, cause=repr(error.__cause__))
        else:
            say(failed=None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    say(events=[event.at for event in journal.load(10).events], since=journal.events_since_compaction)
    journal.append([note(2), note(3)], [ended("b")])
    journal.close()


if __name__ == "__main__":
    {"write": write, "hold": hold, "hold_with_children": hold_with_children, "starve": starve}[sys.argv[1]](
        Path(sys.argv[2])
    )
