"""Finds the promises of a fleet that were broken, in its journal, the logs of its boxes and the lines of its workers.

It is pure, and comes after history_check.py, which reads the workers' lines alone.

- `gap`: positions of the journal are missing or double, or the journal ends before its head;
- `epoch`: epochs fall along the journal, or an event has another epoch than the take-over before it;
- `unannounced`: a GPU was granted on a node that did not announce itself to that leader;
- `obeyed`: a box took orders of an older epoch than it had seen;
- `twin`: a second box with the name of another one was taken;
- `acknowledged`: a client was told of a grant that the journal does not have;
- `expired`: a lease expired, or was ended by the server, within a TTL of a renewal that its box took;
- `fence`: along the journal, the fences of a GPU do not grow;
- `order`: a request was granted while an earlier one of the same owner, for the same, waited;
- `unserved`: a request for one GPU waited when all faults were over, and came to no end in the time that it was given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from operator import attrgetter
from typing import NamedTuple

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import EndReason
from gpu_worker_pool.core.model.request import Request
from tests.e2e.history_check import ROUNDED_S, Violation
from tests.e2e.run_history import LeaseRecord, Line, RunHistory


class JournalRow(NamedTuple):
    """An event as PostgreSQL has it."""

    position: int
    epoch: int
    event: ev.DurableEvent


@dataclass
class FleetHistory:
    """`joined` has, for each process that is a box, by its node, the epochs in which a leader took it, in order.
    `joined_by_twins` has the same of each second box that a leader answered. `recorded` are the ended leases of the accounting
    with their fences: the journal may have been condensed.
    """

    workers: RunHistory
    journal: Sequence[JournalRow]
    head: int
    joined: Mapping[str, Sequence[int]] = field(default_factory=dict)
    joined_by_twins: Mapping[str, Sequence[int]] = field(default_factory=dict)
    recorded: Collection[tuple[str, int]] = ()

    def __post_init__(self) -> None:
        # All boxes of a test are on one machine, so the boot clock of each leader is that of the workers.
        self.bases: dict[int, float] = {}
        # The epoch of the leader that made the event, by position. A new leader that writes lost events again writes them
        # before its own take-over, with its own epoch.
        self.made_in: dict[int, int] = {}
        taken: int | None = None
        for row in self.journal:
            if isinstance(row.event, ev.TakenOver):
                taken = row.event.epoch
                self.bases[taken] = row.event.clock_base
            self.made_in[row.position] = row.epoch if taken is None else taken

    def at(self, row: JournalRow) -> float | None:
        """When it happened on the boot clock; None if that leader's base was condensed away."""
        base = self.bases.get(self.made_in[row.position])
        return None if base is None else row.event.at - base

    def grants(self) -> Iterator[tuple[JournalRow, ev.LeaseGranted]]:
        return ((row, row.event) for row in self.journal if isinstance(row.event, ev.LeaseGranted))


def check_fleet(history: FleetHistory) -> list[Violation]:
    """Return everything that is wrong with this history, beyond what the workers' lines alone show."""
    checks = (
        check_positions,
        check_epochs,
        check_announced,
        check_boxes,
        check_acknowledged,
        check_renewed,
        check_fences,
        check_order,
        check_served,
    )
    return [violation for one in checks for violation in one(history)]


def check_positions(history: FleetHistory) -> Iterator[Violation]:
    positions = [row.position for row in history.journal]
    for earlier, later in pairwise(positions):
        if later != earlier + 1:
            yield Violation("gap", f"position {later} follows {earlier}")
    if positions and positions[-1] != history.head:
        yield Violation("gap", f"the last position is {positions[-1]}, and the head is {history.head}")


def check_epochs(history: FleetHistory) -> Iterator[Violation]:
    newest, taken = 0, 0
    for row in history.journal:
        if row.epoch < newest:
            yield Violation("epoch", f"position {row.position} has epoch {row.epoch}, and {newest} came before")
        newest = max(newest, row.epoch)
        if isinstance(row.event, ev.TakenOver):
            taken = row.event.epoch
        # What a new leader writes again after lost commits has its own epoch, and is older than its take-over.
        if taken > row.epoch:
            yield Violation("epoch", f"position {row.position} is of epoch {row.epoch}, and {taken} had taken over")


def check_announced(history: FleetHistory) -> Iterator[Violation]:
    for row, granted in history.grants():
        epoch = history.made_in[row.position]
        for node in {gpu.node for gpu in granted.gpus}:
            if epoch not in history.joined.get(node, ()):
                text = f"{granted.lease_id} on {node}, which had not announced itself in epoch {epoch}"
                yield Violation("unannounced", text)


def check_boxes(history: FleetHistory) -> Iterator[Violation]:
    for node, epochs in history.joined.items():
        for earlier, later in pairwise(epochs):
            if later < earlier:
                yield Violation("obeyed", f"{node} took a leader of epoch {later} after one of {earlier}")
    for node, epochs in history.joined_by_twins.items():
        for epoch in epochs:
            yield Violation("twin", f"a second box named {node} was taken in epoch {epoch}")


def check_acknowledged(history: FleetHistory) -> Iterator[Violation]:
    gpus: dict[tuple[str, int], set[str]] = defaultdict(set)
    fences: dict[str, int] = {}
    for row in history.journal:
        if isinstance(row.event, ev.LeaseGranted):
            fences[row.event.lease_id] = row.event.fence
        if isinstance(row.event, ev.LeaseGranted | ev.LeaseExtended):
            key = row.event.lease_id, fences.get(row.event.lease_id, 0)
            gpus[key] |= {gpu.uuid for gpu in row.event.gpus}
    for lease in history.workers.leases.values():
        if lease.fence is None:
            continue
        if (lease.id, lease.fence) in history.recorded:
            continue
        found = gpus.get((lease.id, lease.fence))
        if found is None:
            yield Violation("acknowledged", f"{lease}: {lease.id} was granted, and the journal does not know it")
        elif not set(lease.uuids) <= found:
            yield Violation("acknowledged", f"{lease} was granted {lease.uuids}, and the journal has {sorted(found)}")


def check_renewed(history: FleetHistory) -> Iterator[Violation]:
    of_id = {lease.id: lease for lease in history.workers.leases.values()}
    for row in history.journal:
        event, ended_at = row.event, history.at(row)
        if not isinstance(event, ev.LeaseEnded) or ended_at is None:
            continue
        if event.reason is not EndReason.EXPIRED and event.by is None:
            continue
        lease = of_id.get(event.lease_id)
        for line in lease.lines if lease is not None else ():
            if lease is None or line["what"] != "renewed":
                continue
            # The box took the renewal after it was sent, and has told the leader of the end before that wrote it.
            if ended_at < line["sent"] + lease.ttl_s - ROUNDED_S:
                after_s = ended_at - line["sent"]
                yield Violation("expired", f"{lease} expired {after_s:.3f} s after a renewal, of {lease.ttl_s} s")
                break


def check_fences(history: FleetHistory) -> Iterator[Violation]:
    highest: dict[GpuKey, int] = {}
    for row, granted in history.grants():
        for gpu in granted.gpus:
            if granted.fence <= highest.get(gpu, 0):
                text = f"at {row.position}, {granted.lease_id} has {granted.fence} on {gpu} after {highest[gpu]}"
                yield Violation("fence", text)
            highest[gpu] = max(granted.fence, highest.get(gpu, 0))


def check_order(history: FleetHistory) -> Iterator[Violation]:
    waiting: dict[str, tuple[int, Request]] = {}
    for row in history.journal:
        event = row.event
        if isinstance(event, ev.LeaseQueued | ev.LeaseGranted) and event.request is not None:
            waiting[event.lease_id] = event.seq, event.request
        if isinstance(event, ev.LeaseEnded):
            waiting.pop(event.lease_id, None)
        elif isinstance(event, ev.LeaseGranted) and (found := waiting.pop(event.lease_id, None)) is not None:
            seq, request = found
            for other, (before, others) in waiting.items():
                # One that a box brought back has no place in line.
                if before <= 0 or _line(others) != _line(request):
                    continue
                if before < seq and others.priority >= request.priority:
                    yield Violation("order", f"at {row.position}, {event.lease_id} was granted before {other}")


def check_served(history: FleetHistory) -> Iterator[Violation]:
    """The line `patience` says since when there were no more faults, and until when the workers were left to work. A request
    for several GPUs is left out: others may take what it cannot use.
    """
    for line in history.workers.of_kind("patience"):
        for lease in outstanding(history.workers, line["since"]):
            if lease in outstanding(history.workers, line["at"]):
                text = f"{lease} waited {line['at'] - line['since']:.0f} s after the last fault, and came to no end"
                yield Violation("unserved", text)


def outstanding(history: RunHistory, at: float) -> list[LeaseRecord]:
    """The requests for one GPU that waited at this time. A worker has one at a time: it asks again when the one before was served,
    refused or ended.
    """
    newest: dict[str, LeaseRecord] = {}
    for lease in sorted(history.leases.values(), key=attrgetter("asked_at")):
        if lease.asked_at <= at:
            newest[lease.who] = lease
    gone = {line["who"] for line in history.of_kind("exits") if line["at"] <= at} | history.killed.keys()
    waiting = (lease for who, lease in newest.items() if who not in gone and lease.granted_at > at)
    return [lease for lease in waiting if lease.wishes[0] == 1 and not any(_ends(line, at) for line in lease.lines)]


def _ends(line: Line, at: float) -> bool:
    is_end = line["what"] == "lost" or line.get("end_reason") is not None or line.get("call") == "request_gpu"
    return bool(line["at"] <= at and is_end)


def _line(request: Request) -> tuple[object, ...]:
    return request.wishes, request.holder.owner, request.preemptible


def take_overs(history: FleetHistory, broken_at: Sequence[float]) -> list[float]:
    """How long after each of these times of the boot clock, at which a leader was broken, another one granted a GPU; infinite
    if none did. Times before those that the journal still has are left out.
    """
    found = []
    first = min((at for row in history.journal if (at := history.at(row)) is not None), default=inf)
    for broken in (at for at in broken_at if at >= first):
        epoch = max((row.epoch for row in history.journal if (history.at(row) or 0.0) <= broken), default=0)
        times = [history.at(row) for row, _ in history.grants() if row.epoch > epoch]
        later = [at for at in times if at is not None and at > broken]
        found.append(min(later, default=inf) - broken)
    return found
