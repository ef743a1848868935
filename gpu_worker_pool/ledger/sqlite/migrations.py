"""Versions of a journal's tables, and the migrations between them."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from gpu_worker_pool.ledger.failpoints import reach

from . import one_clock


class Migration(NamedTuple):
    """Migrates to `version` from the one before: by a script, then by a function for what SQL cannot say."""

    version: int
    script: str
    rewrite: Callable[[sqlite3.Connection], None] = lambda _: None


_REWRITES = {4: one_clock.rewrite}


@cache
def known_migrations() -> tuple[Migration, ...]:
    folder = files(__package__).joinpath("sql", "migrations")
    scripts = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    numbered = [(int(file.name.split("_")[0]), file.read_text("utf-8")) for file in scripts]
    return tuple(Migration(number, text, *filter(None, [_REWRITES.get(number)])) for number, text in numbered)


def version_of(connection: sqlite3.Connection) -> int:
    """The version of the tables; 0 if there are none."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def migrate(connection: sqlite3.Connection, migrations: Sequence[Migration]) -> None:
    """Apply the missing migrations, each wholly or not at all: its version is set in the same transaction."""
    for version, script, rewrite in migrations:
        if version <= version_of(connection):
            continue
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in _statements(script):
                connection.execute(statement)
            rewrite(connection)
            reach("in_migration")
            connection.execute(f"PRAGMA user_version = {version}")
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        reach("after_migration")


def back_up(connection: sqlite3.Connection, path: Path) -> Path:
    """Copy the file before it is migrated, named after its version.

    There is one copy per version: a migration that is killed and restarted must not fill the disk.
    """
    copy = Path(f"{path}.version-{version_of(connection)}")
    part = Path(f"{copy}.part")
    part.unlink(missing_ok=True)
    create_private(part)
    with closing(sqlite3.connect(part)) as target:
        connection.backup(target)
    part.rename(copy)
    return copy


def create_private(path: Path) -> None:
    """Create an empty file that only its owner may read; SQLite gives its logs the same rights."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def _statements(script: str) -> Iterator[str]:
    """Split a script: sqlite3's executescript would commit before it begins."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    if statement.strip():
        yield statement
