"""The SQL files of a package: its queries by name, and the migrations of its tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, NamedTuple

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


class Migration(NamedTuple):
    """Migrates to `version` from the one before: by a script, then by `rewrite`, which gets the connection."""

    version: int
    script: str
    rewrite: Callable[[Any], None] | None = None


@cache
def load_queries(package: str) -> Mapping[str, str]:
    text = files(package).joinpath("sql", "queries.sql").read_text("utf-8")
    # The text before the first name is a comment on the whole file.
    _, *parts = _NAME.split(text)
    return MappingProxyType({name: query.strip() for name, query in zip(parts[::2], parts[1::2], strict=True)})


@cache
def load_migrations(package: str) -> tuple[Migration, ...]:
    folder = files(package).joinpath("sql", "migrations")
    scripts = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    return tuple(Migration(int(file.name.split("_")[0]), file.read_text("utf-8")) for file in scripts)
