"""What the settings say of the fleet that a server belongs to."""

from __future__ import annotations

import socket
import zlib
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.host.addresses import is_every_address, urls
from gpu_worker_pool.ledger.journal import JournalError
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal
from gpu_worker_pool.ledger.take_over import restored

from .settings import ServerSettings

if TYPE_CHECKING:
    from gpu_worker_pool.ledger.postgres.database import PostgresDatabase

# Of several candidates that see that nobody leads, each waits for a part of this time: mostly one of them claims.
SPREAD_S = 0.3


class FleetUnusable(Exception):  # noqa: N818 - a state of affairs, not a mistake
    """The server must not start: without its fleet it would grant GPUs as a pool of its own."""


def fleet_database(settings: ServerSettings) -> PostgresDatabase | None:
    """The database of the fleet; None if the server belongs to none. FleetUnusable if the settings cannot be used."""
    url = settings.gpu_pool_fleet.get_secret_value().strip() if settings.gpu_pool_fleet else ""
    if not url:
        return None
    if url.startswith(("http://", "https://")):
        raise FleetUnusable(
            "GPU_POOL_FLEET (--fleet) names other servers; this version needs the URL of the database there, "
            "postgresql://host/name"
        )
    try:
        from gpu_worker_pool.ledger.postgres.database import PostgresDatabase  # noqa: PLC0415 - may be missing
    except ModuleNotFoundError as error:
        raise FleetUnusable(
            f"{error.name} is not installed, and a fleet needs it; run pip install 'gpu-worker-pool[fleet]'"
        ) from None
    own_address(settings, settings.port)
    try:
        return PostgresDatabase(url, settings.gpu_pool_fleet_pool or None)
    except JournalError as error:
        raise FleetUnusable(f"GPU_POOL_FLEET (--fleet) cannot be used: {error}") from None


def check_own_journal(path: Path, pool: PoolSettings) -> None:
    """Refuse to join a fleet while leases of the time before are left: the fleet knows nothing of them, and would grant their
    GPUs. FleetUnusable says what to do. JournalInUse if another server has the journal.
    """
    if not path.exists():
        return
    journal = SqliteJournal(path)
    try:
        live = restored(journal.load(0), pool).leases.values()
    finally:
        journal.close()
    if live:
        raise FleetUnusable(
            f"{len(live)} {'lease is' if len(live) == 1 else 'leases are'} left in this box's own journal, {path}, and the "
            "fleet would grant their GPUs to others. Start this server without GPU_POOL_FLEET (--fleet), take its GPUs out of "
            "service (gpu-pool drain --all), wait until all leases have ended (gpu-pool leases), and start it again with it"
        )


def own_address(settings: ServerSettings, port: int) -> str:
    """The URL at which the other boxes reach this server. FleetUnusable if the one that is set is none."""
    if given := settings.gpu_pool_fleet_address:
        parts = urlsplit(given)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username or parts.query:
            shown = "not a URL without a user and parameters" if "@" in given or "?" in given else repr(given)
            raise FleetUnusable(
                f"GPU_POOL_FLEET_ADDRESS is {shown}; it must be the URL at which the other boxes reach this server, "
                "such as http://gpu-01:8000"
            )
        return given.rstrip("/")
    host = socket.gethostname() if is_every_address(settings.host) else settings.host
    return urls(host, port, settings.api_prefix, names=())[0]


def spread_s(node: str, url: str) -> float:
    """This candidate's own part of SPREAD_S: always the same, and mostly another one than that of the others."""
    return SPREAD_S * (zlib.crc32(f"{node} {url}".encode()) % 1000) / 1000


def has_password(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.password is not None or "password" in parse_qs(parts.query)
    except ValueError:
        return True  # it may have one
