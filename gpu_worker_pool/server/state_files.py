"""The files in which a server keeps its leases."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gpu_worker_pool.host.state_dir import StateDirError, state_dir
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal

from .settings import ServerSettings


def journal_path(settings: ServerSettings) -> Path:
    """The path of the journal. Simulated GPUs have a journal of their own."""
    folder = state_dir(settings.gpu_pool_state_dir, os.environ, platform=sys.platform, uid=os.getuid())
    if settings.simulated_gpus is None:
        return folder / "leases.sqlite3"
    node = "".join(sign if sign.isalnum() or sign in "._-" else "_" for sign in settings.gpu_pool_node)
    return folder / f"simulated-{node}.sqlite3"


def journal_name(settings: ServerSettings) -> str | None:
    """The same in words; None where there is no folder for it."""
    try:
        return str(journal_path(settings).absolute())
    except StateDirError:
        return None


def open_journal(settings: ServerSettings) -> SqliteJournal:
    """Open the journal; JournalError or StateDirError where that cannot be done."""
    durability, node = settings.gpu_pool_durability, settings.gpu_pool_node
    return SqliteJournal(journal_path(settings), durability=durability, node=node)


def custody_path(settings: ServerSettings) -> Path:
    """The path of the file in which a box of a fleet keeps its leases."""
    path = journal_path(settings)
    return path.with_name(f"custody-{path.name}")
