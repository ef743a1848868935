"""What the settings say of the fleet that a server belongs to."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import zlib
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from gpu_worker_pool.core.model.lease import EndedLease
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.host.addresses import is_every_address, urls
from gpu_worker_pool.host.state_dir import (
    StateDirError,
    check_files,
    create_private,
    make_state_dir,
    state_dir,
    sync_folder,
)
from gpu_worker_pool.ledger.driver import restored
from gpu_worker_pool.ledger.journal import JournalError
from gpu_worker_pool.ledger.sqlite.backup import back_up
from gpu_worker_pool.ledger.sqlite.custody import CustodyFile
from gpu_worker_pool.ledger.sqlite.journal import SqliteJournal

from .agent.custody_store import LEASE, seen_of
from .agent.handshake import LEAST_CHARACTERS, FleetKey
from .settings import ServerSettings

if TYPE_CHECKING:
    from gpu_worker_pool.ledger.postgres.database import PostgresDatabase

# What `GPU_POOL_FLEET` is on a box that leads with its own journal (`serve --lead`).
LEAD = "lead"
KEY_FILE = "fleet-key"

# Of several candidates that see that nobody leads, each waits for a part of this time: mostly one of them claims.
SPREAD_S = 0.3
MAKE_ONE = (
    "make one with `openssl rand -hex 32`, and set it on all boxes of the fleet (GPU_POOL_FLEET_KEY, or _KEY_FILE)"
)


class FleetUnusable(Exception):  # noqa: N818 - a state of affairs, not a mistake
    """The server must not start: without its fleet it would grant GPUs as a pool of its own."""


def fleet_url(settings: ServerSettings) -> str:
    """What is set as the fleet of this server; empty if it belongs to none."""
    return settings.gpu_pool_fleet.get_secret_value().strip() if settings.gpu_pool_fleet else ""


def leads_alone(settings: ServerSettings) -> bool:
    """Whether this server leads its fleet with its own journal."""
    return fleet_url(settings) == LEAD


def listed_boxes(settings: ServerSettings) -> tuple[str, ...]:
    """The boxes that a server asks for its leader, if it cannot lead itself; empty for a candidate, and without a fleet.
    FleetUnusable if one of them is not a URL.
    """
    text = fleet_url(settings)
    if not text.startswith(("http://", "https://")):
        return ()
    return tuple(_box_url(part.strip()) for part in text.split(",") if part.strip())


def _box_url(given: str) -> str:
    parts = urlsplit(given)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username or parts.query:
        raise FleetUnusable(
            f"GPU_POOL_FLEET (--fleet) has {given!r}; a box that cannot lead needs the URLs of boxes of its fleet, such as "
            "http://gpu-01:8000,http://gpu-02:8000"
        )
    return given.rstrip("/")


def fleet_database(settings: ServerSettings) -> PostgresDatabase | None:
    """The database of the fleet; None if the server belongs to none, or cannot lead. FleetUnusable if the settings cannot
    be used.
    """
    url = fleet_url(settings)
    if not url:
        return None
    own_address(settings, settings.port)
    if listed_boxes(settings) or leads_alone(settings):
        fleet_key(settings)
        return None
    try:
        from gpu_worker_pool.ledger.postgres.database import PostgresDatabase  # noqa: PLC0415 - may be missing
    except ModuleNotFoundError as error:
        raise FleetUnusable(
            f"{error.name} is not installed, and a fleet needs it; run pip install 'gpu-worker-pool[fleet]'"
        ) from None
    try:
        database = PostgresDatabase(url, settings.gpu_pool_fleet_pool or None)
    except JournalError as error:
        raise FleetUnusable(f"GPU_POOL_FLEET (--fleet) cannot be used: {error}") from None
    fleet_key(settings)
    return database


def check_own_journal(path: Path, pool: PoolSettings) -> int:
    """Refuse to join a fleet while leases of the time before are left: the fleet knows nothing of them, and would grant their
    GPUs. FleetUnusable says what to do. JournalInUse if another server has the journal. Return the highest fence of the time
    before: fences go on from there.
    """
    if not path.exists():
        return 0
    with closing(SqliteJournal(path)) as journal:
        state = restored(journal.load(0), pool)
    # What an ended one leaves on a GPU, the readings show.
    if live := sum(not isinstance(lease, EndedLease) for lease in state.leases.values()):
        raise _with_leases_left(live, path)
    return max(state.fences.values(), default=0)


def check_copy_of_own_journal(path: Path, pool: PoolSettings) -> None:
    """The same, for a journal that another server may have: nothing is changed."""
    if not path.exists():
        return
    with TemporaryDirectory(prefix="gpu-pool-") as folder:
        facts = back_up(path, Path(folder) / "copy", pool)
    if live := facts.active + facts.waiting:
        raise _with_leases_left(live, path)


def _with_leases_left(live: int, path: Path) -> FleetUnusable:
    return FleetUnusable(
        f"{live} {'lease is' if live == 1 else 'leases are'} left in this box's own journal, {path}, and the fleet would grant "
        "their GPUs to others. Start this server without GPU_POOL_FLEET (--fleet), take its GPUs out of service (gpu-pool "
        "drain --all), wait until all leases have ended (gpu-pool jobs --all), and start it again with it"
    )


def check_custody(path: Path) -> int:
    """Refuse to grant GPUs alone while this box keeps leases of the fleet that it belonged to. FleetUnusable says what to do.
    JournalInUse if another server has the file. Return the highest fence that the box has had in its fleet.
    """
    if not path.exists():
        return 0
    file = CustodyFile(path)
    file.close()
    if kept := sum(kind == LEASE for kind, _ in file.rows):
        raise FleetUnusable(
            f"this box still keeps {kept} {'lease' if kept == 1 else 'leases'} of its fleet, in {path}, and would grant their "
            "GPUs to others. Start it with GPU_POOL_FLEET (--fleet) again, take its GPUs out of service (gpu-pool drain --all), "
            "and wait until the leases have ended (gpu-pool jobs --all). If the fleet is gone for good, make sure that no "
            "program uses the GPUs, and move the file away"
        )
    return seen_of(file.rows)[1]


def highest_fence(path: Path) -> int:
    """The highest fence that this box has had in its fleet."""
    if not path.exists():
        return 0
    with closing(CustodyFile(path)) as file:
        return seen_of(file.rows)[1]


def fleet_key(settings: ServerSettings) -> FleetKey:
    """The key of the fleet: the one that is set, else the one that this box keeps. FleetUnusable if it cannot be used."""
    given = settings.gpu_pool_fleet_key.get_secret_value().strip() if settings.gpu_pool_fleet_key else ""
    name = "GPU_POOL_FLEET_KEY"
    if settings.gpu_pool_fleet_key_file:
        name = "GPU_POOL_FLEET_KEY_FILE"
        if given:
            raise FleetUnusable("GPU_POOL_FLEET_KEY and GPU_POOL_FLEET_KEY_FILE are both set; set one of them")
        try:
            given = Path(settings.gpu_pool_fleet_key_file).read_text("utf-8").strip()
        except (OSError, UnicodeError) as error:
            # A decoding error would quote a part of the key.
            reason = "it is not UTF-8" if isinstance(error, UnicodeError) else error
            raise FleetUnusable(f"GPU_POOL_FLEET_KEY_FILE cannot be read: {reason}") from None
        if not given:
            raise FleetUnusable(f"the file of GPU_POOL_FLEET_KEY_FILE is empty; {MAKE_ONE}")
    if not given:
        try:
            given = kept_key(settings)
        except (OSError, UnicodeError, StateDirError) as error:
            why = "it is not UTF-8" if isinstance(error, UnicodeError) else str(error)
            raise FleetUnusable(f"the fleet's key in the state directory cannot be read: {why}") from None
    if given and len(given) < LEAST_CHARACTERS:
        raise FleetUnusable(f"{name} has {len(given)} characters; a key needs at least {LEAST_CHARACTERS}: {MAKE_ONE}")
    if not given:
        how = f"`gpu-pool fleet key` on the box that leads shows the line to paste here; without --lead, {MAKE_ONE}"
        raise FleetUnusable(f"a fleet needs a key; {how if listed_boxes(settings) else MAKE_ONE}")
    return FleetKey(given)


def key_path(settings: ServerSettings) -> Path:
    """Where this box keeps the key. StateDirError if there is no directory for it."""
    folder = state_dir(settings.gpu_pool_state_dir, os.environ, platform=sys.platform, uid=os.getuid())
    return folder.absolute() / KEY_FILE


def kept_key(settings: ServerSettings) -> str:
    """The key that this box keeps; empty if it keeps none. StateDirError if another user could have written it."""
    path = key_path(settings)
    check_files(path)
    return path.read_text("utf-8").strip() if path.exists() else ""


def keep_key(settings: ServerSettings) -> None:
    """Keep the key that was given in the state directory, so that it is needed only once, or make one where this box leads.
    FleetUnusable if that is not possible.
    """
    fleet = fleet_url(settings)
    given = settings.gpu_pool_fleet_key.get_secret_value().strip() if settings.gpu_pool_fleet_key else ""
    if settings.gpu_pool_fleet_key_file or not (fleet == LEAD or (given and fleet.startswith("http"))):
        return
    try:
        known = kept_key(settings)
        if (known and given in ("", known)) or 0 < len(given) < LEAST_CHARACTERS:
            return  # one that is too short is refused, and not kept
        path = key_path(settings)
        make_state_dir(path.parent)
        draft = path.with_name(f"{KEY_FILE}.new")
        draft.unlink(missing_ok=True)
        create_private(draft)
        draft.write_text(f"{given or secrets.token_hex(32)}\n", "utf-8")
        draft.rename(path)
        sync_folder(path.parent)
    except (OSError, StateDirError) as error:
        raise FleetUnusable(f"the key of the fleet cannot be kept: {error}") from None


def join_line(key: str, address: str) -> str:
    """What to paste on the other boxes. The key is not an option: every user of a machine can read command lines."""
    return f"GPU_POOL_FLEET_KEY={key} gpu-pool serve --join {address}"


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


def address_for_itself(settings: ServerSettings, port: int) -> str:
    """The URL at which this process reaches itself."""
    host = "127.0.0.1" if is_every_address(settings.host) else settings.host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{settings.api_prefix}"


def spread_s(node: str, url: str) -> float:
    """This candidate's own part of SPREAD_S: always the same, and mostly another one than that of the others."""
    return SPREAD_S * (zlib.crc32(f"{node} {url}".encode()) % 1000) / 1000


def has_password(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.password is not None or "password" in parse_qs(parts.query)
    except ValueError:
        return True  # it may have one
