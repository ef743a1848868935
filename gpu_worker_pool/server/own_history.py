"""A box that led its fleet with its own journal goes on alone, or its fleet goes on with a database: what becomes of the files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_worker_pool.core.decider.condense import condense
from gpu_worker_pool.core.decider.decide import decide
from gpu_worker_pool.core.decider.evolve import replay
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.events import DurableEvent, TakenOver
from gpu_worker_pool.core.model.lease import ActiveLease
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.host.state_dir import sync_folder
from gpu_worker_pool.ledger.driver import restored
from gpu_worker_pool.ledger.journal import JournalError, JournalInUse
from gpu_worker_pool.ledger.sqlite.custody import CustodyFile
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from gpu_worker_pool.server.agent.custody_store import LEASE, SEEN, seen_of
from gpu_worker_pool.server.fleet import (
    FleetUnusable,
    check_custody,
    check_own_journal,
    fleet_url,
    highest_fence,
    leads_alone,
)
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.server.state_files import custody_path, journal_path

# A journal that was copied to a database has this at the end of its name.
MOVED = ".moved"


def check_not_moved(journal: Path) -> None:
    """Refuse to lead while the fleet goes on with a database: there would be two leaders."""
    moved = Path(f"{journal}{MOVED}")
    if moved.exists() and not journal.exists():
        raise FleetUnusable(
            f"the leases of this fleet were moved to a database, {moved} says when: start this server with --fleet "
            "postgresql://… instead. If that database is gone for good, make sure that no program uses the GPUs, and delete "
            "the file"
        )


@dataclass(frozen=True, slots=True)
class Moved:
    """What was copied, where it is, and where the old journal is kept. `database` is a URL without its password."""

    database: str
    leases: int
    waiting: int
    kept: Path


def move_journal(journal: Path, url: str, pool: str | None, settings: PoolSettings) -> Moved:
    """Copy the journal of the fleet that this box leads to a database, and keep the file under another name. JournalInUse while
    the server runs; JournalError or FleetUnusable if it cannot be copied: then nothing has changed here.
    """
    if not journal.exists():
        raise FleetUnusable(
            f"there is no journal at {journal}; run this on the box that leads, as the user of its server"
        )
    with closing(SqliteJournal(journal)) as file:
        state = restored(file.load(0), settings)
        if state.epoch == 0:
            raise FleetUnusable(f"{journal} is not of a fleet: start the server with --lead once, then stop it")
        try:
            from gpu_worker_pool.ledger.postgres.move import JournalCopy, move_to  # noqa: PLC0415 - may be missing
        except ModuleNotFoundError as error:
            raise FleetUnusable(
                f"{error.name} is not installed, and a database needs it; run pip install 'gpu-worker-pool[fleet]'"
            ) from None
        mark = f"moved from {file.pool_id} at event {file.position}"
        copy = JournalCopy(file.pool_id, mark, state.epoch, condense(state), file.complete_since)
        database = asyncio.run(move_to(url, pool, copy, file.all_ended()))
    kept = Path(f"{journal}{MOVED}")
    kept.unlink(missing_ok=True)
    journal.rename(kept)
    sync_folder(journal.parent)
    active = sum(isinstance(lease, ActiveLease) for lease in state.leases.values())
    return Moved(database, active, len(state.queue), kept)


def leave_lead(journal: Path, custody: Path, node: str, settings: PoolSettings) -> None:
    """Go on alone with the leases of this box, if it led a fleet with this journal. FleetUnusable while leases of other boxes
    are in it; JournalInUse if another server has one of the files.
    """
    if not journal.exists() or not custody.exists():
        return
    try:
        with closing(SqliteJournal(journal)) as file:
            state = restored(file.load(0), settings)
            if state.epoch > 0:
                file.compact(_alone(state, node))
    except JournalInUse:
        raise
    except JournalError:
        return  # the server opens it again, and says what is wrong with it
    _take_back(custody, {id_ for id_, lease in state.leases.items() if isinstance(lease, ActiveLease)})


def _alone(state: PoolState, node: str) -> Sequence[DurableEvent]:
    """The short history of this box without the others."""
    others = sorted({*state.nodes, *(key.node for key in state.slots)} - {node})
    active = [lease for lease in state.leases.values() if isinstance(lease, ActiveLease)]
    if left := [lease for lease in active if any(key.node != node for key in lease.gpus)]:
        boxes = ", ".join(sorted({key.node for lease in left for key in lease.gpus} - {node}))
        raise FleetUnusable(
            f"this box leads a fleet, and {len(left)} {'lease is' if len(left) == 1 else 'leases are'} on other boxes "
            f"({boxes}): start it with --lead again, take the others out of service (gpu-pool drain NODE --wait), and "
            "start it without --lead once their leases have ended"
        )
    for name in others:
        replay(state, decide(state, cmd.ForgetNode(name, None), state.clock))
    return [replace(each, epoch=0) if isinstance(each, TakenOver) else each for each in condense(state)]


def _take_back(custody: Path, known: set[str]) -> None:
    """The journal alone has the leases from here on. Those that it does not know are of another fleet, and stay."""
    with closing(CustodyFile(custody)) as file:
        kept = [key for key in file.rows if key[0] == LEASE]
        if kept and {id_ for _, id_ in kept} <= known:
            epoch, _ = seen_of(file.rows)
            # Without the fence that was seen: a lease that a box has seen and does not keep counts as ended.
            file.write({**dict.fromkeys(kept), SEEN: json.dumps([epoch, 0])})


def prepare_files(settings: ServerSettings) -> int:
    """Take up what this box left as a box of a fleet, or alone. Return the highest fence that it had then. FleetUnusable if
    leases are left that a server of this kind does not know.
    """
    pool, journal, custody = settings.pool_settings(), journal_path(settings), custody_path(settings)
    if not fleet_url(settings):
        fence = highest_fence(custody)
        leave_lead(journal, custody, settings.gpu_pool_node, pool)
        return max(fence, check_custody(custody))
    if not leads_alone(settings):
        return check_own_journal(journal, pool)
    check_not_moved(journal)
    return 0
