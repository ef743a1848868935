"""Quarantine of damaged files: they are kept, and block the start until an operator has moved them."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path


def isolate(path: Path) -> Path | None:
    """Rename a database and its log; return the new name, None if neither existed.

    SQLite finds a log by its name, so the two stay together. The database goes first: without its log it would look
    like a sound one with fewer events.
    """
    quarantined = _free_name(path)
    log, its_log = Path(f"{path}-wal"), Path(f"{quarantined}-wal")
    is_there = path.exists()
    if is_there:
        path.rename(quarantined)
    if log.exists():
        # Opening the file leaves an empty one, which need not be kept.
        if log.stat().st_size:
            log.rename(its_log)
            is_there = True
        else:
            log.unlink()
    sync_folder(path.parent)
    return quarantined if is_there else None


def isolated(path: Path) -> list[Path]:
    """Files in quarantine that were not yet moved away, oldest first."""
    return sorted(path.parent.glob(f"{glob.escape(path.name)}.damaged-*"))


def advice(path: Path, quarantined: Iterable[Path]) -> str:
    names = ", ".join(map(str, quarantined))
    return (
        f"The damaged journal was set aside as {names}. Its leases are no longer known: make sure that "
        f"no process still uses the GPUs, then move that file out of {path.parent} and restart."
    )


def sync_folder(folder: Path) -> None:
    """Make the names of its files survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free_name(path: Path) -> Path:
    first = f"{path}.damaged-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    name, number = first, 1
    while os.path.lexists(name) or os.path.lexists(f"{name}-wal"):
        number += 1
        name = f"{first}-{number}"
    return Path(name)
