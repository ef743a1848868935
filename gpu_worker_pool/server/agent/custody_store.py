"""The disk of a box's custody: its leases, their ends, and what it has seen of leaders. One thread writes."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from gpu_worker_pool.core.fleet.custody import Custody
from gpu_worker_pool.core.fleet.custody_actions import CustodyAction, Keep, KeepTokens, NoteSeen
from gpu_worker_pool.core.fleet.messages import KeptLease, LeaseOver
from gpu_worker_pool.core.model.configured import AccessToken
from gpu_worker_pool.host.state_dir import check_files, create_private, sync_folder
from gpu_worker_pool.ledger.sqlite.custody import CustodyFile, Rows
from gpu_worker_pool.ledger.sqlite.file import journal_errors

from .frames import decode_kept, encode_kept

logger = logging.getLogger(__name__)

LEASE, OVER, TOKEN, SEEN, POOL = "lease", "over", "token", ("seen", ""), ("pool", "")


class CustodyStore:
    def __init__(self, file: CustodyFile, machine_id: str, thread: ThreadPoolExecutor) -> None:
        self._file = file
        self._thread = thread
        # Tells this box from another one of the same name. It is not in the database, so it outlives damage to that.
        self.machine_id = machine_id
        # Of the fleet, so that holders believe this box also before it has found a leader; None: it has had none.
        self.pool_id = file.rows.get(POOL)

    @property
    def epoch_seen(self) -> int:
        return seen_of(self._file.rows)[0]

    @classmethod
    async def open(cls, path: Path) -> Self:
        """Open the file, or make it. JournalInUse if another server has it, JournalError if it cannot be used."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="custody")
        loop = asyncio.get_running_loop()
        try:
            file = await loop.run_in_executor(thread, CustodyFile, path)
            await loop.run_in_executor(thread, _forget_unreadable, file)
            return cls(file, await loop.run_in_executor(thread, _machine_id, path), thread)
        except BaseException:
            thread.shutdown(wait=False)
            raise

    def custody(self, node: str, boot_id: str, now: float, least_fence: int = 0) -> Custody:
        """What the disk has. Fences go on above `least_fence`, which the box had before it belonged to the fleet."""
        rows = self._file.rows
        epoch_seen, fence_seen = seen_of(rows)
        return Custody(
            node,
            self.machine_id,
            boot_id,
            now,
            epoch_seen=epoch_seen,
            fence_seen=max(fence_seen, least_fence),
            leases=[decode_kept(KeptLease, body) for (kind, _), body in rows.items() if kind == LEASE],
            instance=secrets.token_hex(8),
            over=[decode_kept(LeaseOver, body) for (kind, _), body in rows.items() if kind == OVER],
            tokens=[decode_kept(AccessToken, body) for (kind, _), body in rows.items() if kind == TOKEN],
        )

    async def write(self, actions: Iterable[CustodyAction], pool_id: str | None = None) -> None:
        """Write what these actions say, all or none, and the fleet that they belong to. JournalError if that cannot be done
        now.
        """
        changes: dict[tuple[str, str], str | None] = {}
        if pool_id is not None and pool_id != self.pool_id:
            changes[POOL] = pool_id
        for action in actions:
            match action:
                case Keep(lease_id=lease_id, what=what):
                    changes[LEASE, lease_id] = encode_kept(what) if isinstance(what, KeptLease) else None
                    changes[OVER, lease_id] = encode_kept(what) if isinstance(what, LeaseOver) else None
                case KeepTokens(tokens=tokens):
                    changes |= {key: None for key in (*self._file.rows, *changes) if key[0] == TOKEN}
                    changes |= {(TOKEN, token.digest): encode_kept(token) for token in tokens}
                case NoteSeen(epoch=epoch, fence=fence):
                    changes[SEEN] = json.dumps([epoch, fence])
                case _:
                    pass
        if changes:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._file.write, changes)
            self.pool_id = changes.get(POOL, self.pool_id)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._file.close)
        self._thread.shutdown(wait=False)


def _forget_unreadable(file: CustodyFile) -> None:
    """If a version far from this one wrote the leases, forget them all, and the fence that was seen: then the leader tells
    them again. Were only some forgotten, the leader would take those for ended.
    """
    kinds = {LEASE: KeptLease, OVER: LeaseOver, TOKEN: AccessToken}
    try:
        for (kind, _), body in file.rows.items():
            if kind in kinds:
                decode_kept(kinds[kind], body)
    except ValueError as error:
        logger.error("another version of this program wrote the leases of this box (%s); the leader tells them", error)  # noqa: TRY400
        changes: dict[tuple[str, str], str | None] = {key: None for key in file.rows if key[0] in kinds}
        epoch = int(json.loads(file.rows.get(SEEN, "[0, 0]"))[0])
        file.write({**changes, SEEN: json.dumps([epoch, 0])})


def seen_of(rows: Rows) -> tuple[int, int]:
    """The highest epoch and fence that the box has seen."""
    epoch, fence = json.loads(rows.get(SEEN, "[0, 0]"))
    return int(epoch), int(fence)


def _machine_id(path: Path) -> str:
    """The id in the file beside the leases, which is made once."""
    file = Path(f"{path}.id")
    with journal_errors(file):
        check_files(file)
        if file.exists() and (known := file.read_text("ascii").strip()):
            return known
        draft = Path(f"{file}.new")
        draft.unlink(missing_ok=True)
        create_private(draft)
        draft.write_text(secrets.token_hex(16), "ascii")
        draft.rename(file)
        sync_folder(file.parent)
        return file.read_text("ascii")
