"""A journal as a server would have left it, with waiters and ended leases."""

from __future__ import annotations

from pathlib import Path

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import EndedLease, EndReason
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.host.clock import boot_id, boot_time, wall_offset
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal

NODE = "benchmark"
FILE = f"simulated-{NODE}.sqlite3"
OWNERS = 100
AT_ONCE = 1_000
# The server has this many GPUs for the waiters. The first waiter gets half of them when the server starts, and keeps
# them. All the others want every GPU, and one in seven of them an amount of memory that no other asks for. They cannot be
# served, but the free half is held for the first of them. A more urgent request takes GPUs that they compete for.
FEWEST_GPUS = 8
OWN_SIZE_EVERY = 7
LEAST_MB = 1_000
LEASE_S = 60.0


def write_journal(folder: Path, waiters: int, ended: int) -> None:
    """Write a journal into the folder of a server's state, for simulated GPUs and the node `NODE`.

    With waiters, the server must have `FEWEST_GPUS` GPUs.
    """
    now, offset_s = boot_time(), wall_offset()
    first_at = now + offset_s - LEASE_S * (ended + 2)
    journal = SqliteJournal(folder / FILE, durability="normal")
    try:
        opened = [ev.TakenOver(now, 0, boot_id(), 0.0, offset_s), ev.HistoryCondensed(now, (), 1)]
        queued = [
            ev.LeaseQueued(now, f"waiting-{number}", _request(number, _awaited(number)), number + 1, now + offset_s)
            for number in range(waiters)
        ]
        journal.compact([*opened, *queued])
        for first in range(0, ended, AT_ONCE):
            numbers = range(first, min(first + AT_ONCE, ended))
            journal.append([], [_ended(number, first_at + LEASE_S * number) for number in numbers])
    finally:
        journal.close()


def _awaited(number: int) -> Wishes:
    if number == 0:
        return Wishes(gpus=FEWEST_GPUS // 2)
    own_mb = LEAST_MB + number if number % OWN_SIZE_EVERY == 0 else None
    return Wishes(gpus=FEWEST_GPUS, memory_mb=own_mb)


def _request(number: int, wishes: Wishes) -> Request:
    return Request(wishes, Holder(worker_id=f"worker-{number}", owner=f"owner-{number % OWNERS}"), 0, ttl_s=36_000.0)


def _ended(number: int, at: float) -> EndedLease:
    return EndedLease(
        f"ended-{number}",
        _request(number, Wishes()),
        (GpuKey(NODE, "GPU-0"),),
        number + 1,
        requested_at=at,
        granted_at=at,
        ended_at=at + LEASE_S,
        reason=EndReason.RELEASED,
    )
