"""The SQL queries of this package."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


@cache
def load_queries() -> Mapping[str, str]:
    text = files(__package__).joinpath("sql", "queries.sql").read_text("utf-8")
    # The text before the first name is a comment on the whole file.
    _, *parts = _NAME.split(text)
    return MappingProxyType({name: query.strip() for name, query in zip(parts[::2], parts[1::2], strict=True)})
