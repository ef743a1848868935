"""Events and ended leases as rows of the journal's tables, with their checksums."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from gpu_worker_pool.core.model.events import DurableEvent
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.ledger.codec import encode_ended, encode_event, encode_gpus

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
        encode_gpus(lease.gpus),
        body,
        crc32(body.encode()),
    )


def _storable(text: str | None) -> str | None:
    """Escape lone surrogates, which are not UTF-8; the body has them unchanged."""
    return text if text is None or text.isascii() else text.encode("utf-8", "backslashreplace").decode()
