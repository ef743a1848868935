"""What `gpu-pool doctor` finds out about this machine as a server. Needs the packages of the server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gpu_worker_pool.cli.serve.port_holder import PortHolder, find_server
from gpu_worker_pool.cli.units import count, show_memory
from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.host.gpu_lock import LockHolder, lock_holder
from gpu_worker_pool.host.state_dir import StateDirError, check_is_private
from gpu_worker_pool.ledger.sqlite.lock import holder_pid
from gpu_worker_pool.server.hooks import RulesUnusable, read_rules
from gpu_worker_pool.server.http.tokens import Tokens
from gpu_worker_pool.server.serving import advice, bind
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.server.state_files import journal_path

from . import fleet
from .finding import Check, Finding, complaints, judge_settings
from .machine import probe

LITTLE_MB = 100.0


def checks(*, is_client_only: bool) -> list[Check]:
    with complaints() as heard:
        settings = ServerSettings.load()
    return [
        Check("server-settings", lambda: judge_settings("server", heard)),
        Check("simulated", lambda: judge_simulated(settings.simulated_gpus, has_gpus=bool(probe().readings))),
        Check("port", lambda: check_port(settings, is_client_only=is_client_only)),
        Check("authority", lambda: judge_authority(find_holders(probe().readings))),
        Check("state-dir", lambda: check_state_dir(settings)),
        Check("tokens", lambda: check_tokens(settings)),
        Check("hooks", lambda: check_hooks(settings)),
        *fleet.checks(settings),
    ]


def judge_simulated(simulated_gpus: str | None, *, has_gpus: bool) -> Iterator[Finding]:
    if simulated_gpus:
        text = f"SIMULATED_GPUS={simulated_gpus}: a server started here hands out simulated GPUs"
        hides = Finding("simulated", "warning", f"{text}, and not the real ones", "unset SIMULATED_GPUS")
        yield hides if has_gpus else Finding("simulated", "ok", text)


def check_port(settings: ServerSettings, *, is_client_only: bool) -> Iterator[Finding]:
    """Try to bind the server's address, for a moment and without listening."""
    try:
        bind(settings).close()
    except OSError as error:
        holder = find_server(settings.host, settings.port, settings.api_prefix)
        yield judge_port(f"{settings.host}:{settings.port}", error, holder, is_client_only=is_client_only)
    else:
        yield Finding("port", "ok", f"{settings.host}:{settings.port} is free: a server can be started there")


def judge_port(where: str, error: OSError, holder: PortHolder | None, *, is_client_only: bool) -> Finding:
    """Who has the port. A machine whose endpoints are all elsewhere need not be able to serve."""
    if holder is not None:
        source = ", simulated" if holder.source == "simulated" else ""
        shown = f"{holder.node}, {count(holder.gpu_count, 'GPU')}{source}"
        return Finding("port", "ok", f"a GPU server runs at {holder.url} ({shown})")
    why, _, how = advice(error).partition("; ")
    text = f"a server cannot listen on {where}: {why}, and no GPU server answers there"
    return Finding("port", "warning" if is_client_only else "problem", text, how or None)


def find_holders(readings: Sequence[Reading]) -> dict[LockHolder, list[int]]:
    """The servers that have GPUs of this machine, with the indices of those."""
    found: dict[LockHolder, list[int]] = {}
    for reading in readings:
        if holder := lock_holder(reading.gpu.key.uuid):
            found.setdefault(holder, []).append(reading.gpu.index)
    return found


def judge_authority(holders: Mapping[LockHolder, Sequence[int]]) -> Iterator[Finding]:
    """Whose servers grant the GPUs of this machine. A second server would grant none of these."""
    for holder, indices in holders.items():
        which = ", ".join(map(str, indices))
        text = f"the server of {holder.user} (pid {holder.pid}) grants these GPUs of this machine: {which}"
        yield Finding("authority", "ok", text, f"use that one: --endpoint {holder.url}" if holder.url else None)


def check_state_dir(settings: ServerSettings) -> Iterator[Finding]:
    """Where the leases are kept. No lock is taken: it would keep a server that starts just now from starting."""
    name, elsewhere = "state-dir", "set GPU_POOL_STATE_DIR to a folder of the server's own on a local disk"
    try:
        journal = journal_path(settings).absolute()
        folder, used_by = journal.parent, holder_pid(journal)
        # Path.exists would raise for a folder that this user may not enter.
        nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110
        if nearest == folder and used_by is None:  # the server that has it may be another user's
            check_is_private(folder)
    except StateDirError as error:
        yield Finding(name, "problem", *str(error).split("; ", 1))
        return
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        text = f"you cannot {'write to' if nearest == folder else 'make'} {folder}: see the permissions of {nearest}"
        yield Finding(name, "problem", text, elsewhere)
        return
    free_mb = shutil.disk_usage(nearest).free / 2**20
    if free_mb < LITTLE_MB:
        text = f"only {show_memory(free_mb)} is free for {folder}; on a full disk nothing is granted"
        yield Finding(name, "problem", text, "free some space, or set GPU_POOL_STATE_DIR to another disk")
        return
    used = "" if used_by is None else f", in use by the server with pid {used_by}"
    there = "there" if nearest == folder else "can be made"
    yield Finding(name, "ok", f"{journal} ({there}, {show_memory(free_mb)} free{used})")


def check_tokens(settings: ServerSettings) -> Iterator[Finding]:
    """Whether the tokens of the settings can be used and are secret. Those of a running server are in its journal."""
    with complaints() as heard:
        tokens: Tokens = settings.load_tokens()
    file = settings.gpu_pool_tokens_file
    if tokens.is_broken or tokens.too_short:
        yield Finding("tokens", "problem", "; ".join(heard), "correct GPU_POOL_TOKENS or the file: lines of name:token")
    elif file and can_everybody_read(Path(file)):
        text = f"every user of this machine can read the tokens in {file}, and use them"
        yield Finding("tokens", "problem", text, f"chmod 600 {file}, and give out new tokens")
    elif not tokens.is_unset:
        yield Finding("tokens", "ok", f"tokens of {', '.join(sorted(tokens.names))}")


def can_everybody_read(path: Path) -> bool:
    """Whether every user of the machine can read it, which includes passing through all folders above it."""
    try:
        folders = [folder.stat().st_mode & 0o001 for folder in path.resolve().parents]
        return bool(path.stat().st_mode & 0o004) and all(folders)
    except OSError:
        return False


def check_hooks(settings: ServerSettings) -> Iterator[Finding]:
    if file := settings.gpu_pool_hooks_file:
        try:
            yield Finding("hooks", "ok", f"{count(len(read_rules(Path(file))), 'hook')} in {file}")
        except RulesUnusable as why:
            yield Finding("hooks", "problem", str(why), "correct GPU_POOL_HOOKS_FILE; until then no hook runs")
