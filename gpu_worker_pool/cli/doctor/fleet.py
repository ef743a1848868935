"""What `gpu-pool doctor` finds out about the fleet that a server of this machine belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gpu_worker_pool.cli.output import plain
from gpu_worker_pool.cli.pools.servers import FLEET, Servers
from gpu_worker_pool.host.addresses import is_this_machine
from gpu_worker_pool.host.state_dir import StateDirError
from gpu_worker_pool.ledger.journal import JournalError
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
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.server.state_files import journal_path
from gpu_worker_pool.wire.fleet import FleetList
from gpu_worker_pool.wire.reader import read

from .finding import Check, Finding

if TYPE_CHECKING:
    from gpu_worker_pool.ledger.postgres.look import DatabaseFacts

ASK_S = 5.0


def checks(settings: ServerSettings) -> list[Check]:
    """None where the server belongs to no fleet."""
    if not fleet_url(settings):
        return []
    return [
        Check("fleet-settings", lambda: check_settings(settings)),
        Check("fleet-database", lambda: check_database(settings)),
        Check("fleet-boxes", lambda: check_boxes(settings)),
    ]


def check_settings(settings: ServerSettings) -> Iterator[Finding]:
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


def check_database(settings: ServerSettings) -> Iterator[Finding]:
    """Whether the database can be used, without changing anything in it. An agent needs none, nor a leader without one."""
    if listed_boxes(settings) or leads_alone(settings):
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


def check_boxes(settings: ServerSettings) -> Iterator[Finding]:
    """The boxes, as the first box that answers knows them."""
    urls = [address_for_itself(settings, settings.port), *(listed_boxes(settings) or ()), *_leaders(settings)]
    answers = Servers(urls, timeout_s=ASK_S).run(lambda servers: servers.ask_all(FLEET))
    listed = next(filter(None, (read(FleetList, each.data, clean=plain) for each in answers if each.is_ok)), None)
    if listed is None:
        how = "start this server, or wait for a leader; `gpu-pool fleet` shows the boxes then"
        text = f"no box of the fleet lists its boxes; asked: {', '.join(urls)}"
        yield Finding("fleet-boxes", "skipped", text, how)
        return
    with suppress(FleetUnusable):  # fleet-settings says so
        yield from judge_boxes(listed, settings.gpu_pool_node, own_address(settings, settings.port))


def _leaders(settings: ServerSettings) -> Sequence[str]:
    """The boxes that the database names; fleet-database says where it cannot be asked."""
    with suppress(ModuleNotFoundError, JournalError):
        if not listed_boxes(settings) and not leads_alone(settings):
            return _look(settings).leaders
    return ()


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
