"""The events that a process has read, checked: none altered, none missing, none out of order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_worker_pool.core.fleet.leadership import StoredEvent
from gpu_worker_pool.ledger.codec import checked_crc, decode_event
from gpu_worker_pool.ledger.fleet_database import HistoryChanged
from gpu_worker_pool.ledger.journal import JournalDamaged, JournalTooNew

from .parameters import epoch_prefix
from .url import DatabaseUrl


class Tail:
    """Remembers how far the events were read or written, to notice that the past was written again."""

    def __init__(self, url: DatabaseUrl) -> None:
        self._url = url
        self._last: tuple[int, int] | None = None  # position and checksum

    def check(self, rows: Sequence[Any], after: int, most: int) -> list[StoredEvent]:
        """The events after this position, of rows of the query `read_events`."""
        head = rows[0]["head"]
        found = [row for row in rows if row["position"] is not None]
        is_all = len(found) <= most
        position, crc, found = self._base(found, after)
        events = []
        for row in found[:most]:
            if row["position"] != position + 1:
                raise self.damaged(_missing(position + 1, row["position"] - 1))
            try:
                crc = checked_crc(epoch_prefix(row["epoch"]) + row["body"], row["crc"], crc)
            except ValueError as error:
                raise self.damaged(f"the event at position {row['position']}: {error}") from error
            try:
                event = decode_event(row["body"])
            except ValueError as error:
                raise self.too_new(f"the event at position {row['position']}: {error}") from error
            position += 1
            events.append(StoredEvent(position, row["epoch"], event))
        if is_all and position < head:
            raise self.damaged(_missing(position + 1, head))
        if position > head >= after:
            raise self.damaged(f"there are events after the last one, at position {head}")
        if events:
            self.note(position, crc)
        return events

    def _base(self, found: list[Any], after: int) -> tuple[int, int, list[Any]]:
        """What the events go on from: a position, its checksum, and the rows after it. It is a later position than `after`
        if a snapshot has replaced the events in between.
        """
        position, crc = after, 0
        if found and found[0]["position"] == after:
            crc = found[0]["crc"]
            found = found[1:]
        elif found and found[0]["position"] > 1:
            if found[0]["crc_before"] is None:
                raise self.damaged(_missing(after + 1, found[0]["position"] - 1))
            position, crc = found[0]["position"] - 1, found[0]["crc_before"]
        else:
            return position, crc, found
        self.must_match(position, crc)
        return position, crc, found

    def note(self, position: int, crc: int) -> None:
        """This process has written up to here."""
        self._last = (position, crc)

    def must_match(self, position: int, crc: int) -> None:
        """HistoryChanged if this is known to have been another event."""
        if self._last is not None and self._last[0] == position and self._last[1] != crc:
            self._last = None
            raise HistoryChanged(
                f"the event at position {position} in the database {self._url} is not the one that this process knows: the "
                "database lost commits, and another leader wrote on; read the journal again from its snapshot"
            )

    def damaged(self, what: str) -> JournalDamaged:
        return JournalDamaged(
            f"the journal in the database {self._url} is damaged ({what}): restore the database from a backup, or promote a "
            "standby. To begin again without its leases, make sure that no process still uses the GPUs, and set "
            "GPU_POOL_FLEET_POOL to a new name on all candidates"
        )

    def too_new(self, what: str) -> JournalTooNew:
        return JournalTooNew(
            f"the journal in the database {self._url} was written by a newer version of this program ({what}): install the "
            "newer one on this machine as well. Until then this server does not lead; it keeps the leases on its own GPUs"
        )


def _missing(first: int, last: int) -> str:
    return f"the event at position {first} is missing" if first == last else f"events {first} to {last} are missing"
