"""Puts a copy of a journal in the place of the journal, so that nothing is granted twice."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpu_worker_pool.core.decider.condense import put_back
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.ledger.driver import restored
from gpu_worker_pool.ledger.failpoints import reach
from gpu_worker_pool.ledger.faults import journal_errors
from gpu_worker_pool.ledger.journal import JournalError
from gpu_worker_pool.ledger.sql_files import load_queries
from gpu_worker_pool.ledger.state_dir import check_files, make_state_dir

from . import quarantine
from .backup import JournalFacts, check, copy_rows, facts_of
from .journal import FILES, SqliteJournal, connect
from .lock import FileLock, JournalLock
from .migrations import create_private

REASON = "restored from a backup: make sure that no program from before uses this GPU, then gpu-pool undrain"


@dataclass(frozen=True, slots=True)
class Restored:
    """What was put in place, whose tokens it accepts, and where the journal is now that was there before."""

    facts: JournalFacts
    token_names: tuple[str, ...]
    replaced: Path | None


def restore(copy: Path, journal: Path, settings: PoolSettings, *, replace: bool = False) -> Restored:
    """Put a checked copy in the place of the journal. JournalError, and nothing is changed, if the copy is damaged, a server
    has the journal (JournalInUse), or a journal is there and `replace` was not asked for; then it is kept under another name.

    The leases and the queue are those of the copy. All GPUs are out of service, also those that the copy does not know; fences go on far ahead, and the pool has a
    new identity: holders of leases that the copy does not know take it for another pool, and keep their GPUs from it.
    """
    copy, journal = copy.absolute(), journal.absolute()
    if not copy.exists():
        raise JournalError(f"there is no file {copy}")
    check(copy, settings)
    with _locked(journal):
        is_there = any(os.path.lexists(f"{journal}{end}") for end in ("", "-wal"))
        if is_there and not replace:
            raise JournalError(
                f"there is a journal {journal}, which may know of later leases; --force keeps it under another name, and "
                "puts the backup in its place"
            )
        facts, token_names, new = _prepared(copy, journal, settings)
        # While a file is set aside under this name, a server makes no new journal: a restore that is killed here leaves no
        # way to grant anything.
        aside = quarantine.isolate(journal) if is_there else None
        reach("in_restore")
        for end in (".mark", "-shm"):
            Path(f"{journal}{end}").unlink(missing_ok=True)
        new.rename(journal)
        quarantine.sync_folder(journal.parent)
        new.parent.rmdir()
        return Restored(facts, token_names, None if aside is None else _kept(aside))


def _prepared(copy: Path, journal: Path, settings: PoolSettings) -> tuple[JournalFacts, tuple[str, ...], Path]:
    """What the journal to put in place has, whose tokens it accepts, and where it is: complete, in a folder of its own."""
    folder = Path(f"{journal}.restoring")
    shutil.rmtree(folder, ignore_errors=True)  # of a restore that was killed
    folder.mkdir(mode=0o700)
    new = folder / journal.name
    try:
        create_private(new)
        copy_rows(copy, new)
        # It migrates the copy, if an older version made it.
        with closing(SqliteJournal(new)) as opened:
            state = restored(opened.load(0), settings)
            opened.compact(put_back(state, REASON))
        with closing(connect(new)) as connection:
            connection.execute(load_queries(__package__)["renew_pool_id"])
            connection.execute("PRAGMA journal_mode = DELETE")
            facts = facts_of(state, connection)
        for beside in folder.iterdir():
            if beside != new:
                beside.unlink()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return facts, tuple(sorted({token.name for token in state.tokens.values()})), new


def _kept(aside: Path) -> Path:
    """Rename what was set aside, log and all: it is not damaged."""
    kept = aside.with_name(aside.name.replace(".damaged-", ".replaced-"))
    for end in ("-wal", ""):
        if (file := Path(f"{aside}{end}")).exists():
            file.rename(f"{kept}{end}")
    return kept


@contextmanager
def _locked(journal: Path) -> Iterator[None]:
    """Keep every server from this journal. JournalInUse if one has it."""
    with journal_errors(journal):
        if journal.parent.exists() and (owner := journal.parent.stat().st_uid) != os.geteuid():
            raise JournalError(
                f"{journal.parent} belongs to the user with uid {owner}, whose server could not write a journal of another "
                f"user; restore it as that user: sudo -u '#{owner}' gpu-pool restore"
            )
        make_state_dir(journal.parent)
        check_files(*(Path(f"{journal}{end}") for end in FILES))
        lock = JournalLock(journal)
        file_lock = None
        try:
            if journal.exists():
                file_lock = FileLock(journal)
            yield
        finally:
            if file_lock is not None:
                file_lock.release()
            lock.release()
