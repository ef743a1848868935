"""Events and ended leases as text parameters of one statement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from json import dumps
from math import isfinite

from gpu_worker_pool.core.model.events import DurableEvent
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.ledger.codec import ended_row, event_rows


def epoch_prefix(epoch: int) -> str:
    """What the checksum of an event covers before its body."""
    return f"{epoch} "


def event_lines(events: Sequence[DurableEvent], epoch: int, crc: int) -> tuple[str, int]:
    """One event a line, after its checksum, and the last checksum. An encoded event is one line of ASCII."""
    rows = event_rows(events, crc, epoch_prefix(epoch))
    return "\n".join(f"{crc} {body}" for body, crc in rows), rows[-1][1] if rows else crc


def ended_json(leases: Iterable[EndedLease]) -> str:
    """A lease that is there twice counts once, as the latest."""
    latest: dict[object, dict[str, object]] = {}
    for lease in leases:
        body, crc = ended_row(lease)
        key = (lease.id, lease.requested_at)
        latest.pop(key, None)
        latest[key] = {
            "body": body,
            "crc": crc,
            "lease_id": storable(lease.id),
            "owner": storable(lease.request.holder.owner),
            "gpus": [[storable(part) for part in gpu] for gpu in lease.gpus],
            "is_shared": lease.request.wishes.is_shared,
            "requested_at": storable(lease.requested_at),
            "granted_at": storable(lease.granted_at),
            "ended_at": storable(lease.ended_at),
            "reason": lease.warned or lease.reason,  # for the accounting: it ended because it was warned
            "mean_utilization_percent": storable(lease.mean_utilization_percent),
        }
    return dumps(list(latest.values()))


def storable(value: object) -> object:
    """PostgreSQL has no zero bytes in a text and no half of a surrogate pair, and JSON has no infinite numbers."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, str) and (not value.isascii() or "\0" in value):
        return value.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
    return value
