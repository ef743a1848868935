"""Events, snapshots and ended leases as parameters of statements, and read again: none altered, missing or out of order."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from json import dumps
from math import isfinite
from typing import Any

from gpu_worker_pool.core.fleet.leadership import JournalEnd, StoredEvent
from gpu_worker_pool.core.model.events import DurableEvent
from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.host.pauses import Pauses
from gpu_worker_pool.ledger.codec import NotUnderstood, checked_crc, decode_event, encode_event, ended_row, event_rows

# Three times as quick as the default, for a tenth more bytes.
_LEVEL = 1


class NotAfter(Exception):  # noqa: N818 - a state of affairs, not a mistake
    """The events do not go on from where the reader is: it has read another journal, or events were pruned."""


def _epoch_prefix(epoch: int) -> str:
    """What the checksum of an event covers before its body."""
    return f"{epoch} "


def event_lines(events: Sequence[DurableEvent], epoch: int, end: JournalEnd) -> tuple[str, JournalEnd]:
    """One event a line, after its checksum, and the end of a journal with them. An encoded event is one line of ASCII."""
    rows = event_rows(events, end.crc, _epoch_prefix(epoch))
    new_end = JournalEnd(end.position + len(rows), rows[-1][1]) if rows else end
    return "\n".join(f"{crc} {body}" for body, crc in rows), new_end


def read_stored(rows: Sequence[Any], after: JournalEnd, most: int) -> list[StoredEvent]:
    """At most this many events after this end, of rows of the query `read_events`. NotAfter as above; NotUnderstood if a
    newer version wrote one, and another ValueError if one is damaged.
    """
    head, found = rows[0]["head"], [row for row in rows if row["position"] is not None]
    is_all = len(found) <= most
    if head < after.position:
        raise NotAfter(f"the journal ends at event {head}")
    if found and found[0]["position"] == after.position:
        if found[0]["crc"] != after.crc:
            raise NotAfter(f"event {after.position} is another one")
        found = found[1:]
    elif (found[0]["position"] if found else head + 1) != after.position + 1:
        raise NotAfter(f"event {after.position + 1} is not there")
    elif found and found[0]["crc_before"] not in (None, after.crc):
        raise NotAfter(f"event {after.position} was another one")
    events, end = list[StoredEvent](), after
    for row in found[:most]:
        if row["position"] != end.position + 1:
            raise ValueError(_missing(end.position + 1, row["position"] - 1))
        try:
            crc = checked_crc(_epoch_prefix(row["epoch"]) + row["body"], row["crc"], end.crc)
        except ValueError as error:
            raise ValueError(f"the event at position {row['position']}: {error}") from error
        end = JournalEnd(row["position"], crc)
        try:
            event = decode_event(row["body"])
        except NotUnderstood as error:
            raise NotUnderstood(f"the event at position {end.position}: {error}") from error
        events.append(StoredEvent(end, row["epoch"], event))
    if is_all and end.position != head:
        raise ValueError(_missing(end.position + 1, head) if end.position < head else "events follow the last one")
    return events


def _missing(first: int, last: int) -> str:
    return f"the event at position {first} is missing" if first == last else f"events {first} to {last} are missing"


def pack(events: Sequence[DurableEvent]) -> tuple[bytes, int]:
    """A snapshot as compressed lines of JSON, and their checksum. Takes a while, so it belongs in a thread."""
    pauses, lines = Pauses(), []
    for event in events:
        lines.append(encode_event(event))
        pauses.yield_if_due()
    body = zlib.compress("\n".join(lines).encode(), _LEVEL)
    return body, zlib.crc32(body)


def unpack(body: bytes, crc: int) -> tuple[DurableEvent, ...]:
    """The events again; a ValueError says what is wrong with the bytes. NotUnderstood if a newer version wrote them."""
    if zlib.crc32(body) != crc:
        raise ValueError("its checksum is wrong")
    try:
        lines = zlib.decompress(body).decode().split("\n")
    except zlib.error as error:
        raise ValueError(str(error)) from error
    pauses, events = Pauses(), []
    for line in filter(None, lines):
        events.append(decode_event(line))
        pauses.yield_if_due()
    return tuple(events)


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
