"""The queue: one order over all waiters, and the same order within each line of waiters that are treated alike."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import NamedTuple

from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.core.model.lease import QueuedLease
from gpu_worker_pool.core.model.request import Wishes

# (is preemptible, -priority, seq, lease id): sorts, and is unique by its third part.
QueueKey = tuple[bool, int, int, str]


class Line(NamedTuple):
    """All that decides whether a waiter can be served, apart from its place. `owner` is None where owners are treated
    alike.
    """

    wishes: Wishes
    time_limit_s: float | None
    preemptible: bool
    owner: str | None


class WishFamily:
    """Lines that ask for the same, except how much memory of each GPU; the least first. A GPU on which the least of them has
    no room has room for none.
    """

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self._needs_mb: list[float] = []
        self._firsts: list[QueueKey] = []

    def put(self, line: Line, first: QueueKey | None) -> None:
        """Note the first waiter of a line; None if it has no more."""
        need_mb = line.wishes.memory_mb or 0.0
        place = bisect_left(self._needs_mb, need_mb)
        is_known = place < len(self._needs_mb) and self._needs_mb[place] == need_mb
        values = () if first is None else (first,)
        self._firsts[place : place + is_known] = values
        if bool(values) != is_known:
            self._needs_mb[place : place + is_known] = [need_mb for _ in values]
            self.lines[place : place + is_known] = [line for _ in values]

    def within(self, most_mb: float) -> Sequence[Line]:
        """The lines that need at most so much."""
        return self.lines[: bisect_right(self._needs_mb, most_mb)]

    def first_within(self, most_mb: float) -> Line | None:
        """The line of the first waiter of those that need at most so much."""
        number = bisect_right(self._needs_mb, most_mb)
        if number < 2:
            return self.lines[0] if number else None
        return self.lines[min(range(number), key=self._firsts.__getitem__)]


class LeaseQueue:
    """`splits_owners`: owners are not treated alike, because there are quotas, bookings or a fair share.

    A newcomer is put into the order and into its line after the first pass, or when these are asked for: most requests are granted
    at once, and leave before that.
    """

    def __init__(self) -> None:
        self.splits_owners = False
        self._keys: list[QueueKey] = []
        self._arrivals: list[tuple[float, str]] = []
        self._lines: dict[Line, list[QueueKey]] = {}
        self._firsts: list[QueueKey] = []
        self._families: dict[object, WishFamily] = {}
        self._newcomers: dict[str, QueuedLease] = {}
        self._by_owner: dict[str | None, int] = {}
        self._by_process: dict[ProcessId, list[QueueKey]] = {}

    def line_of(self, lease: QueuedLease) -> Line:
        request = lease.request
        owner = request.holder.owner if self.splits_owners else None
        return Line(request.wishes, request.time_limit_s, request.preemptible, owner)

    def split_owners(self, is_split: bool, waiting: Iterable[QueuedLease]) -> None:  # noqa: FBT001 - it is the value
        """Line all waiters up again where that changes."""
        if is_split == self.splits_owners:
            return
        self.splits_owners = is_split
        self._lines, self._firsts, self._families = {}, [], {}
        for lease in waiting:
            self._join_line(lease)

    def join(self, lease: QueuedLease) -> None:
        """Join the queue behind all of the same or a higher priority."""
        holder = lease.request.holder
        self._newcomers[lease.id] = lease
        self._by_owner[holder.owner] = self.length_of(holder.owner) + 1
        if holder.process is not None:
            insort(self._by_process.setdefault(holder.process, []), (*lease.order, lease.id))

    def leave(self, lease: QueuedLease) -> None:
        queue_key, holder = (*lease.order, lease.id), lease.request.holder
        if self._newcomers.pop(lease.id, None) is None:
            del self._keys[bisect_left(self._keys, queue_key)]
            del self._arrivals[bisect_left(self._arrivals, (lease.requested_at, lease.id))]
            self._leave_line(lease, queue_key)
        self._by_owner[holder.owner] -= 1
        if not self._by_owner[holder.owner]:
            del self._by_owner[holder.owner]
        if holder.process is not None:
            of_process = self._by_process[holder.process]
            of_process.remove(queue_key)
            if not of_process:
                del self._by_process[holder.process]

    def _leave_line(self, lease: QueuedLease, queue_key: QueueKey) -> None:
        line = self.line_of(lease)
        alike = self._lines[line]
        first = alike[0]
        del alike[bisect_left(alike, queue_key)]
        if not alike:
            del self._lines[line]
        if first == queue_key:
            self._change_first(line, first, alike[0] if alike else None)

    def line_up(self) -> None:
        """Put the newcomers into the order and into their lines."""
        for lease in self._newcomers.values():
            insort(self._keys, (*lease.order, lease.id))
            insort(self._arrivals, (lease.requested_at, lease.id))
            self._join_line(lease)
        self._newcomers.clear()

    def _in_order(self) -> Sequence[QueueKey]:
        self.line_up()
        return self._keys

    def _join_line(self, lease: QueuedLease) -> None:
        line, queue_key = self.line_of(lease), (*lease.order, lease.id)
        alike = self._lines.setdefault(line, [])
        first = alike[0] if alike else None
        insort(alike, queue_key)
        if alike[0] == queue_key:
            self._change_first(line, first, queue_key)

    def _change_first(self, line: Line, old: QueueKey | None, new: QueueKey | None) -> None:
        if old is not None:
            del self._firsts[bisect_left(self._firsts, old)]
        if new is not None:
            insort(self._firsts, new)
        of = _family_of(line)
        family = self._families.setdefault(of, WishFamily())
        family.put(line, new)
        if not family.lines:
            del self._families[of]

    def place_of(self, lease: QueuedLease) -> int:
        """The place by priority and arrival; 1 comes first."""
        return bisect_left(self._in_order(), (*lease.order, lease.id)) + 1

    def length_of(self, owner: str | None) -> int:
        return self._by_owner.get(owner, 0)

    @property
    def owners(self) -> KeysView[str | None]:
        return self._by_owner.keys()

    def of_process(self, process: ProcessId) -> Sequence[QueueKey]:
        return self._by_process.get(process, ())

    @property
    def processes(self) -> KeysView[ProcessId]:
        """The processes of waiters, where they are known."""
        return self._by_process.keys()

    @property
    def lines(self) -> Mapping[Line, Sequence[QueueKey]]:
        """The waiters of each line, in order."""
        self.line_up()
        return self._lines

    @property
    def firsts(self) -> Sequence[QueueKey]:
        """The first waiter of each line, in order."""
        self.line_up()
        return self._firsts

    @property
    def families(self) -> ValuesView[WishFamily]:
        self.line_up()
        return self._families.values()

    @property
    def arrivals(self) -> Sequence[tuple[float, str]]:
        """When each waiter asked, and its id; the first to come first."""
        self.line_up()
        return self._arrivals

    def __len__(self) -> int:
        return len(self._keys) + len(self._newcomers)

    def __iter__(self) -> Iterator[str]:
        """By priority and arrival."""
        return (lease_id for _, _, _, lease_id in self._in_order())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LeaseQueue) and self._in_order() == other._in_order()

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"<LeaseQueue: {len(self)} waiting, {len(self.lines)} lines>"


def _family_of(line: Line) -> object:
    wishes = line.wishes
    places = (wishes.gpus, wishes.nodes, wishes.model, wishes.among, wishes.node)
    terms = (wishes.is_shared, wishes.memory_threshold_percent, wishes.utilization_threshold_percent)
    return (places, terms, line.time_limit_s, line.preemptible, line.owner)
