"""`gpu-pool backup` and `restore`: the pool of a box in one file, and back."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from gpu_worker_pool.cli.declare import Argument, Option
from gpu_worker_pool.cli.output import complain, out
from gpu_worker_pool.cli.units import show_moment
from gpu_worker_pool.failure import Failure

if TYPE_CHECKING:
    from gpu_worker_pool.ledger.sqlite.backup import JournalFacts
    from gpu_worker_pool.server.settings import ServerSettings

JournalFile = Annotated[
    Path | None,
    Option(
        "--journal",
        metavar="PATH",
        help="The server's journal, as `gpu-pool serve` prints it. By default the one in GPU_POOL_STATE_DIR.",
    ),
]


def backup(
    file: Annotated[Path, Argument(metavar="FILE", help="The file to write; an existing file is not overwritten.")],
    journal: JournalFile = None,
) -> None:
    """Copy the pool of this box into one file: leases, queue, quotas, bookings and accounting.

    The server may run meanwhile. The copy is as of one moment, only its owner can read it, and it is read again and
    checked before it counts. Run it as the user of the server, or as root.
    """
    from gpu_worker_pool.ledger.journal import JournalError  # noqa: PLC0415 - slow
    from gpu_worker_pool.ledger.sqlite.backup import back_up  # noqa: PLC0415

    settings = server_settings(journal)
    path = journal
    if path is None:
        own = own_journal(settings, f"pg_dump --schema gpu_pool --file {file} DATABASE")
        path = meant_journal(own)
        if path != own:
            complain(f"this is a backup of {path}, the journal of the server on this machine")
    try:
        facts = back_up(path, file, settings.pool_settings())
    except JournalError as error:
        raise Failure(str(error)) from None
    if not facts.is_of_fleet and (custody := path.with_name(f"custody-{path.name}")).exists():
        complain(
            f"this box is or was in a fleet ({custody.name} is there), whose leases and accounting are in its PostgreSQL; "
            "this backup has what the box did alone"
        )
    size = file.stat().st_size
    out().print(f"{file}: {_in_words(facts)}; {size / 1024:,.0f} KiB, read again and checked")


def restore(
    file: Annotated[Path, Argument(metavar="FILE", help="What `gpu-pool backup` wrote.")],
    journal: JournalFile = None,
    *,
    force: Annotated[
        bool, Option("--force", help="Replace an existing journal, which is kept under another name.")
    ] = False,
) -> None:
    """Replace the journal with a backup, while the server is stopped. Run it as the user of the server.

    The leases and the queue are those of the backup. Later grants are not in it, so all GPUs are out of service. Make
    sure that no earlier program uses them, then run `gpu-pool undrain --all`.
    """
    from gpu_worker_pool.host.state_dir import StateDirError  # noqa: PLC0415 - slow
    from gpu_worker_pool.ledger.journal import JournalError, JournalInUse  # noqa: PLC0415
    from gpu_worker_pool.ledger.sqlite.backup import restore as put_in_place  # noqa: PLC0415

    settings = server_settings(journal)
    path = journal or own_journal(settings, "pg_restore, or psql --file FILE DATABASE, while no box of the fleet runs")
    if journal is None and (others := [each for each in _journals(path) if each != path]):
        raise Failure(f"there are other journals beside {path}. {_which([*others, path])}")
    try:
        facts, aside = put_in_place(file, path, settings.pool_settings(), replace=force)
    except JournalInUse as error:
        raise Failure(f"stop the server first: {error}") from None
    except (JournalError, StateDirError) as error:
        raise Failure(str(error)) from None
    replaced = None if aside is None else str(aside)
    console = out()
    console.print(f"restored {path}: {_in_words(facts)}")
    if replaced is not None:
        console.print(f"The previous journal is now {replaced}")
    if facts.token_names:
        console.print(
            f"Tokens of {', '.join(facts.token_names)} are accepted again, including any that were revoked since: gpu-pool token list",
        )
    console.print(
        "All GPUs are out of service. Start the server, check that no earlier program still uses them (gpu-pool status), "
        "then run: gpu-pool undrain --all",
    )


def server_settings(journal: Path | None) -> ServerSettings:
    """The settings of the server. A .env that cannot be read matters only where it may name the journal: with `sudo -u` the
    current directory is often one of root.
    """
    try:
        from gpu_worker_pool.cli.serve.command import settings_of  # noqa: PLC0415 - may be missing
        from gpu_worker_pool.server.settings import ServerSettings  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise Failure(
            f"this command needs {error.name}, which is not installed; run pip install 'gpu-worker-pool[server]'"
        ) from None
    try:
        return settings_of({}, {})
    except Failure:
        if journal is None:
            raise
        return ServerSettings(_env_file=None)


def own_journal(settings: ServerSettings, for_a_fleet: str = "pg_dump") -> Path:
    from gpu_worker_pool.host.state_dir import StateDirError  # noqa: PLC0415 - slow
    from gpu_worker_pool.server.fleet import fleet_url, leads_alone  # noqa: PLC0415
    from gpu_worker_pool.server.state_files import journal_path  # noqa: PLC0415

    if fleet_url(settings) and not leads_alone(settings):
        raise Failure(
            "this box belongs to a fleet (GPU_POOL_FLEET), whose leases and accounting are in its PostgreSQL, in the schema "
            f"gpu_pool, for all pools of that database: use {for_a_fleet}"
        )
    try:
        return journal_path(settings).absolute()
    except StateDirError as error:
        raise Failure(str(error)) from None


def meant_journal(own: Path) -> Path:
    """The journal that a server has open; where none has, the only one there is. Failure where several may be meant.

    Journals of simulated GPUs have names of their own.
    """
    from gpu_worker_pool.ledger.sqlite.lock import holder_pid  # noqa: PLC0415 - slow

    found = _journals(own)
    used = [path for path in found if holder_pid(path) is not None]
    if len(used) == 1:
        return used[0]
    if len(found) > 1:
        raise Failure(
            f"{own.parent} has {len(found)} journals, {len(used) or 'none'} of them of a running server. {_which(found)}"
        )
    return found[0] if found else own


def _journals(own: Path) -> list[Path]:
    """All journals in the folder of this one. One that is set aside as damaged is named by that, so it is not passed over."""
    folder = own.parent
    if not os.access(folder, os.R_OK) or (not own.exists() and list(folder.glob(f"{own.name}.damaged-*"))):
        return []
    return sorted(path for path in folder.glob("*.sqlite3") if not path.name.startswith("custody-"))


def _which(journals: list[Path]) -> str:
    return f"Name the one you mean with --journal: {', '.join(map(str, journals))}"


def _in_words(facts: JournalFacts) -> str:
    when = show_moment(facts.changed_at, time.time())
    leases = "1 lease" if facts.active == 1 else f"{facts.active} leases"
    return f"{leases}, {facts.waiting} waiting, {facts.ended} ended; last changed {when}"
