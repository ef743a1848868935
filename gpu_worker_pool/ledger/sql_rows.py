"""The SQL files of a package, and events and ended leases as rows with their checksums."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from zlib import crc32

from gpu_worker_pool.core.model.events import DurableEvent
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.ledger.codec import encode_ended, encode_event

# The version of the tables that this program makes and reads, in SQLite and in PostgreSQL.
VERSION = 1

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)

# A body, and its checksum.
Row = tuple[str, int]


@cache
def load_queries(package: str) -> Mapping[str, str]:
    text = files(package).joinpath("sql", "queries.sql").read_text("utf-8")
    # The text before the first name is a comment on the whole file.
    _, *parts = _NAME.split(text)
    return MappingProxyType({name: query.strip() for name, query in zip(parts[::2], parts[1::2], strict=True)})


@cache
def load_schema(package: str) -> str:
    return files(package).joinpath("sql", "schema.sql").read_text("utf-8")


def event_rows(events: Sequence[DurableEvent], crc: int, prefix: str = "") -> list[Row]:
    """The rows of events. The checksum of each goes on from that of the row before, first from `crc`, and covers `prefix`."""
    rows: list[Row] = []
    for event in events:
        body = encode_event(event)
        crc = crc32((prefix + body).encode(), crc)
        rows.append((body, crc))
    return rows


def ended_row(lease: EndedLease) -> Row:
    body = encode_ended(lease)
    return body, crc32(body.encode())


def checked_crc(body: object, noted_crc: object, crc: int = 0) -> int:
    """The checksum with this body; a ValueError if it is not the one that was noted."""
    if not isinstance(body, str):
        raise ValueError(f"{body!r} is not a text")  # noqa: TRY004 - the file is wrong, not a type
    crc = crc32(body.encode(), crc)
    if crc != noted_crc:
        raise ValueError(f"this was altered, or what came before it: {body[:120]}")
    return crc
