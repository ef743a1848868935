"""The SQL files of a package, and the version of the tables that they make."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

# The tables that this program makes and reads, in SQLite and in PostgreSQL.
VERSION = 1


@cache
def load_queries(package: str) -> Mapping[str, str]:
    """The queries of a package by the names above them. The text before the first name is a comment on the whole file."""
    text = files(package).joinpath("sql", "queries.sql").read_text("utf-8")
    _, *parts = re.split(r"^-- name: (\w+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], map(str.strip, parts[1::2]), strict=True))


@cache
def load_schema(package: str) -> str:
    return files(package).joinpath("sql", "schema.sql").read_text("utf-8")
