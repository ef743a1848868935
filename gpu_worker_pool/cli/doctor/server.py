"""What `gpu-pool doctor` finds out about this machine as a server. Needs the packages of the server."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gpu_worker_pool.cli.output import plain
from gpu_worker_pool.cli.pools.servers import FLEET, Servers
from gpu_worker_pool.cli.serve.port_holder import find_server
from gpu_worker_pool.cli.units import count, show_memory
from gpu_worker_pool.host.addresses import is_this_machine
from gpu_worker_pool.host.state_dir import StateDirError, check_is_private
from gpu_worker_pool.ledger.journal import JournalError
from gpu_worker_pool.ledger.sqlite.lock import holder_pid
from gpu_worker_pool.server.fleet import (
    FleetUnusable,
    address_for_itself,
    check_copy_of_own_journal,
    fleet_database,
    fleet_key,
    fleet_url,
    key_path,
    leads_alone,
    listed_boxes,
    own_address,
)
from gpu_worker_pool.server.hooks import RulesUnusable, read_rules
from gpu_worker_pool.server.http.tokens import Tokens
from gpu_worker_pool.server.serving import advice, bind
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.server.state_files import journal_path
from gpu_worker_pool.wire.pool import FleetList
from gpu_worker_pool.wire.reader import read

from .command import Check, Finding, complaints, judge_settings

if TYPE_CHECKING:
    from gpu_worker_pool.ledger.postgres.look import DatabaseFacts

ASK_S = 5.0
LITTLE_MB = 100.0


def checks() -> list[Check]:
    with complaints() as heard:
        settings = ServerSettings.load()
    return [
        Check("server-settings", lambda: judge_settings("server", heard)),
        Check("port", lambda: check_port(settings)),
        Check("state-dir", lambda: check_state_dir(settings)),
        Check("tokens", lambda: check_tokens(settings)),
        Check("hooks", lambda: check_hooks(settings)),
        *_fleet_checks(settings),
    ]


def _fleet_checks(settings: ServerSettings) -> list[Check]:
    found = {"settings": check_fleet, "database": check_fleet_database, "boxes": check_fleet_boxes}
    return [Check(f"fleet-{name}", partial(find, settings)) for name, find in found.items() if fleet_url(settings)]


def check_port(settings: ServerSettings) -> Iterator[Finding]:
    """Try to bind the server's address, for a moment and without listening. A machine that only uses servers elsewhere need
    not be able to serve.
    """
    where = f"{settings.host}:{settings.port}"
    try:
        bind(settings).close()
    except OSError as error:
        holder, (why, _, how) = (
            find_server(settings.host, settings.port, settings.api_prefix),
            advice(error).partition("; "),
        )
        if holder is None:
            text = f"a server cannot listen on {where}: {why}, and no GPU server answers there"
            yield Finding("port", "warning", text, how or None)
        else:
            shown = f"{holder.node}, {count(holder.gpu_count, 'GPU')}, {holder.source}"
            yield Finding("port", "ok", f"a GPU server runs at {holder.url} ({shown})")
    else:
        yield Finding("port", "ok", f"{where} is free: a server can be started there")


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


# --- the fleet that a server of this machine belongs to ---------------------------------------------------------------


def check_fleet(settings: ServerSettings) -> Iterator[Finding]:
    """The URL's mistakes, the key, and the address at which the other boxes reach this one."""
    try:
        fleet_database(settings)
        fleet_key(settings)
        address = own_address(settings, settings.port)
        with suppress(JournalError, StateDirError, OSError):  # the server says what is wrong with it
            if not leads_alone(settings):
                check_copy_of_own_journal(journal_path(settings), settings.pool_settings())
    except FleetUnusable as error:
        if leads_alone(settings) and not key_path(settings).exists():
            yield Finding("fleet-settings", "ok", "this box leads its fleet; its first start makes the key")
        else:
            yield Finding("fleet-settings", "problem", str(error), "`gpu-pool serve` does not start with it")
        return
    role = "an agent" if listed_boxes(settings) else "its leader" if leads_alone(settings) else "a candidate"
    yield Finding("fleet-settings", "ok", f"this box is {role}, with a key; the others reach it at {address}")
    if is_this_machine(urlsplit(address).hostname or ""):
        text = f"the others are told to reach this box at {address}, which on each machine means itself"
        how = "set HOST to an address that they can reach, or GPU_POOL_FLEET_ADDRESS, as http://gpu-01:8000"
        yield Finding("fleet-settings", "warning", text, how)


def check_fleet_database(settings: ServerSettings) -> Iterator[Finding]:
    """Whether the database can be used, without changing anything in it."""
    if _has_no_database(settings):
        return
    try:
        facts = _look(settings)
    except ModuleNotFoundError:
        return  # fleet-settings says so
    except JournalError as error:
        yield Finding("fleet-database", "problem", str(error), "without it this box cannot lead; the others go on")
        return
    tables = f"tables of version {facts.version}" if facts.version else "no tables yet, a candidate creates them"
    text = f"{facts.shown}: PostgreSQL {facts.server}, {tables}"
    if facts.may_write:
        yield Finding("fleet-database", "ok", text)
    else:
        how = "grant the role its rights, or use the role that owns the tables"
        yield Finding("fleet-database", "problem", f"{text}; the role may not write to them or create them", how)


def check_fleet_boxes(settings: ServerSettings) -> Iterator[Finding]:
    """The boxes, as the first box that answers knows them."""
    urls = [address_for_itself(settings, settings.port), *listed_boxes(settings)]
    with suppress(ModuleNotFoundError, JournalError):  # fleet-database says where it cannot be asked
        urls += () if _has_no_database(settings) else _look(settings).leaders
    answers = Servers(urls, timeout_s=ASK_S).run(lambda servers: servers.ask_all(FLEET))
    listed = next(filter(None, (read(FleetList, each.data, clean=plain) for each in answers if each.is_ok)), None)
    if listed is None:
        how = "start this server, or wait for a leader; `gpu-pool fleet` shows the boxes then"
        text = f"no box of the fleet lists its boxes; asked: {', '.join(urls)}"
        yield Finding("fleet-boxes", "skipped", text, how)
        return
    with suppress(FleetUnusable):  # fleet-settings says so
        yield from judge_boxes(listed, settings.gpu_pool_node, own_address(settings, settings.port))


def _has_no_database(settings: ServerSettings) -> bool:
    """Whether it is an agent, or leads with its own journal."""
    return bool(listed_boxes(settings)) or leads_alone(settings)


def _look(settings: ServerSettings) -> DatabaseFacts:
    from gpu_worker_pool.ledger.postgres.look import look  # noqa: PLC0415 - its driver may be missing

    return asyncio.run(look(fleet_url(settings), settings.gpu_pool_fleet_pool or None))


def judge_boxes(listed: FleetList, node: str, own: str) -> Iterator[Finding]:
    name, up = "fleet-boxes", [box for box in listed.boxes if box.state == "up"]
    text = f"{len(listed.boxes)} boxes, {len(up)} in contact, led by {listed.leader or 'nobody'}"
    yield Finding(name, "ok" if listed.leader else "problem", text)
    boxes_of: dict[str, list[str]] = {}
    for box in up:
        boxes_of.setdefault(box.version or "unknown", []).append(box.node)
    if len(boxes_of) > 1:
        found = "; ".join(f"{version} on {', '.join(sorted(boxes_of[version]))}" for version in sorted(boxes_of))
        how = "this is fine during an upgrade; upgrade the other boxes too, the leader last"
        yield Finding(name, "warning", f"the boxes have different versions: {found}", how)
    for box in listed.boxes:
        if box.state != "up":
            how = "start its server again, or check its key (GPU_POOL_FLEET_KEY); `gpu-pool fleet forget` removes it"
            yield Finding(name, "warning", f"there is no contact with {box.node}; nothing is granted there", how)
        elif box.node == node and box.url is not None and box.url != own:
            how = "the second box is refused; give each its own name with GPU_POOL_NODE"
            yield Finding(name, "problem", f"{box.url} is also a box of the fleet named {node}", how)
