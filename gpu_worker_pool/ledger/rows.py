"""Events and ended leases as rows of the journal's tables, with their checksums."""

from __future__ import annotations

from collections.abc import Sequence
from json import loads
from zlib import crc32

from gpu_worker_pool.core.model.events import DurableEvent
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.ledger.codec import decode_ended, encode_ended, encode_event, encode_gpus
from gpu_worker_pool.ledger.records import parse_object

Row = tuple[object, ...]


def event_rows(events: Sequence[DurableEvent], crc: int) -> tuple[list[Row], int]:
    """The rows of events, without their positions, and the checksum with them; `crc` is that of the row before."""
    rows: list[Row] = []
    for event in events:
        body = encode_event(event)
        crc = crc32(body.encode(), crc)
        rows.append((event.at, type(event).__name__, body, crc))
    return rows, crc


def checked_crc(body: object, noted_crc: object, crc: int) -> int:
    if not isinstance(body, str):
        raise ValueError(f"{body!r} is not a text")  # noqa: TRY004 - the file is wrong, not a type
    crc = crc32(body.encode(), crc)
    if crc != noted_crc:
        raise ValueError(f"this was altered, or what came before it: {body[:120]}")
    return crc


def ended_row(lease: EndedLease) -> Row:
    body = encode_ended(lease)
    return (*_repeated(lease), encode_gpus(lease.gpus), body, crc32(body.encode()))


def checked_event(row: Row, crc: int) -> tuple[str, int]:
    """The body of an event, also of an older version, and the checksum with it; ValueError if anything in the row is not what
    was written.
    """
    at, kind, body, noted_crc = row
    crc = checked_crc(body, noted_crc, crc)
    parts = parse_object(str(body))
    _must_repeat((at, kind), (parts.get("at"), parts.get("kind")), body)
    return str(body), crc


def check_ended(row: Row) -> None:
    """ValueError if anything in the row of an ended lease is not what was written."""
    *columns, gpus, body, noted_crc = row
    checked_crc(body, noted_crc, 0)
    lease = decode_ended(str(body))
    # Not as a text: it had spaces in it once.
    found = tuple(map(tuple, loads(str(gpus))))
    _must_repeat((*columns, found), (*_repeated(lease), lease.gpus), body)


def _must_repeat(columns: Row, parts: Row, body: object) -> None:
    for column, part in zip(columns, parts, strict=True):
        # SQLite has no NaN, and keeps a whole number as a float where the column is for floats.
        expected = float(part) if isinstance(column, float) and isinstance(part, int) else part
        if column != expected and not (column is None and part != part):  # noqa: PLR0124 - NaN
            raise ValueError(f"{column!r} was altered, which is {part!r} in {str(body)[:120]}")


def _repeated(lease: EndedLease) -> Row:
    """What the columns before the GPUs repeat of the body."""
    holder = lease.request.holder
    return (
        _storable(lease.id),
        _storable(holder.owner),
        _storable(holder.worker_id),
        _storable(holder.host),
        len(lease.gpus),
        lease.request.wishes.memory_mb,
        lease.fence,
        lease.requested_at,
        lease.granted_at,
        lease.ended_at,
        (lease.warned or lease.reason).value,  # for the accounting: it ended because it was warned
    )


def _storable(text: str | None) -> str | None:
    """Escape lone surrogates, which are not UTF-8; the body has them unchanged."""
    return text if text is None or text.isascii() else text.encode("utf-8", "backslashreplace").decode()
