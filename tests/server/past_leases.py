"""Leases that ended long ago, in the journal of a server before it is started."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import EndedLease, EndReason
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from gpu_worker_pool.testing import ServerProcess
from tests.server.leasing import new_id

NODE = "box"
# Far from what the tests do now.
THEN = datetime(2026, 3, 1, tzinfo=UTC).timestamp()


def past(owner: str | None, gpus: int, *hours: float, memory_mb: float | None = None) -> EndedLease:
    """A lease asked for, granted and ended at these hours after THEN."""
    requested_at, granted_at, ended_at = (THEN + hour * 3600 for hour in hours)
    return EndedLease(
        new_id("past"),
        Request(Wishes(gpus, memory_mb), Holder(owner=owner)),
        tuple(GpuKey(NODE, f"GPU-{number}") for number in range(gpus)),
        1,
        requested_at,
        granted_at,
        ended_at,
        EndReason.RELEASED,
    )


def server_with_past(leases: Sequence[EndedLease], *, pruned_to: int | None = None) -> ServerProcess:
    """A server, not yet started, whose journal knows these leases, or only the last ones."""
    server = ServerProcess({"GPU_POOL_NODE": NODE, "REFRESH_INTERVAL": "0.05"})
    path = server.state_dir / f"simulated-{NODE}.sqlite3"
    with closing(SqliteJournal(path, most_ended=pruned_to or len(leases))) as journal:
        journal.append((), leases)
        journal.compact(())
    return server
