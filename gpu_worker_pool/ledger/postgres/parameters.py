"""Events and ended leases as text parameters of one statement, and events as rows again."""

from __future__ import annotations

from collections.abc import Sequence
from json import dumps
from math import isfinite, isnan
from zlib import crc32

from gpu_worker_pool.core.model.events import DurableEvent
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.ledger.codec import encode_event
from gpu_worker_pool.ledger.rows import ended_row

_ENDED_COLUMNS = (
    *("lease_id", "owner", "worker_id", "host", "gpu_count", "memory_mb", "fence"),
    *("requested_at", "granted_at", "ended_at", "reason", "gpus", "body", "crc"),
)


def covered(epoch: int, body: str) -> str:
    """What the checksum of an event covers."""
    return f"{epoch} {body}"


def event_lines(events: Sequence[DurableEvent], epoch: int, crc: int) -> tuple[str, int]:
    """One event a line, after its checksum, and the last checksum. An encoded event is one line of ASCII."""
    lines = []
    for event in events:
        body = encode_event(event)
        crc = crc32(covered(epoch, body).encode(), crc)
        lines.append(f"{crc} {body}")
    return "\n".join(lines), crc


def ended_json(leases: Sequence[EndedLease]) -> str:
    """A lease that is there twice counts once, as the latest."""
    latest: dict[str, dict[str, object]] = {}
    for lease in leases:
        row = dict(zip(_ENDED_COLUMNS, map(_storable, ended_row(lease)), strict=True))
        latest.pop(str(row["lease_id"]), None)
        latest[str(row["lease_id"])] = row
    return dumps(list(latest.values()))


def _storable(value: object) -> object:
    """JSON has no infinite numbers, and PostgreSQL no zero bytes in a text. As in SQLite, what is not a number is NULL."""
    if isinstance(value, float) and not isfinite(value):
        return None if isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value.replace("\0", "\\x00") if isinstance(value, str) else value
