"""What `gpu-pool doctor` finds out about the fleet that a server of this machine belongs to."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gpu_worker_pool import __version__
from gpu_worker_pool.cli.output import plain
from gpu_worker_pool.host.addresses import is_this_machine
from gpu_worker_pool.host.state_dir import StateDirError
from gpu_worker_pool.ledger.journal import JournalError
from gpu_worker_pool.server.agent.handshake import HEADER, sign
from gpu_worker_pool.server.app import journal_path
from gpu_worker_pool.server.fleet import (
    FleetUnusable,
    address_for_itself,
    check_copy_of_own_journal,
    fleet_database,
    fleet_key,
    fleet_url,
    listed_boxes,
    own_address,
)
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.wire.fleet import RENEW_AT_BOX, BoxView, FleetList
from gpu_worker_pool.wire.reader import read

from .finding import Check, Finding

if TYPE_CHECKING:
    from gpu_worker_pool.ledger.postgres.look import DatabaseFacts

ASK_S = 5.0
CLOCK_OFF_S = 5.0
_NO_IDS = b'{"ids":[]}'


def checks(settings: ServerSettings) -> list[Check]:
    """None where the server belongs to no fleet."""
    if not fleet_url(settings):
        return []
    return [
        Check("fleet-settings", lambda: check_settings(settings)),
        Check("fleet-database", lambda: check_database(settings)),
        Check("fleet-boxes", lambda: asyncio.run(check_boxes(settings))),
    ]


def check_settings(settings: ServerSettings) -> list[Finding]:
    """The URL's mistakes, the key, and the address at which the other boxes reach this one."""
    try:
        fleet_database(settings)
        key = fleet_key(settings)
        address = own_address(settings, settings.port)
        with suppress(JournalError, StateDirError, OSError):  # the server says what is wrong with it
            check_copy_of_own_journal(journal_path(settings), settings.pool_settings())
    except FleetUnusable as error:
        return [Finding("fleet-settings", "problem", str(error), "`gpu-pool serve` does not start with it")]
    role = "an agent" if listed_boxes(settings) else "a candidate"
    with_key = "with a key" if key.secret else "without a key, as all its boxes are on this machine"
    found = [Finding("fleet-settings", "ok", f"this box is {role}, {with_key}; the others reach it at {address}")]
    if key.secret and is_this_machine(urlsplit(address).hostname or ""):
        text = f"the others are told to reach this box at {address}, which leads each machine to itself"
        how = "set HOST to an address that they can reach, or GPU_POOL_FLEET_ADDRESS, as http://gpu-01:8000"
        found.append(Finding("fleet-settings", "warning", text, how))
    return found


def check_database(settings: ServerSettings) -> list[Finding] | None:
    """Whether the database can be used, without changing anything in it. An agent needs none."""
    if listed_boxes(settings):
        return None
    try:
        facts = asyncio.run(_look(settings))
    except JournalError as error:
        return [Finding("fleet-database", "problem", str(error), "without it this box cannot lead; the others go on")]
    if facts is None:
        return None
    found = []
    tables = f"tables of version {facts.version}" if facts.version else "no tables yet, a candidate creates them"
    text = f"{facts.shown}: PostgreSQL {facts.server}, {tables}"
    if not facts.may_write:
        what = "write to the tables of the fleet" if facts.version else "create the tables of the fleet"
        how = "grant the role its rights, or let the role that owns the tables be the one of the URL"
        found.append(Finding("fleet-database", "problem", f"{text}; the role may not {what}", how))
    else:
        found.append(Finding("fleet-database", "ok", text))
    found += judge_clock("the database", facts.clock_off_s)
    return found


@dataclass(frozen=True, slots=True)
class BoxFacts:
    """A box, and what it says itself: `error` where it cannot be reached, `has_same_key` is None where that is unknown."""

    view: BoxView
    error: str | None = None
    clock_off_s: float | None = None
    has_same_key: bool | None = None


async def _look(settings: ServerSettings) -> DatabaseFacts | None:
    """The facts of the database; None where its driver is not installed: fleet-settings says so."""
    try:
        from gpu_worker_pool.ledger.postgres.look import look  # noqa: PLC0415 - may be missing
    except ModuleNotFoundError:
        return None
    return await look(fleet_url(settings), settings.gpu_pool_fleet_pool or None)


async def _known_boxes(settings: ServerSettings) -> Sequence[str]:
    """The boxes that can be asked for the others: an agent has a list, a candidate finds the leader in the database."""
    if listed := listed_boxes(settings):
        return listed
    try:
        facts = await _look(settings)
    except JournalError:
        return ()  # fleet-database says so
    return () if facts is None else facts.leaders


async def check_boxes(settings: ServerSettings) -> list[Finding]:
    """The other boxes, as the leader knows them and as they answer here."""
    import aiohttp  # noqa: PLC0415 - it loads slowly

    # This server may be the leader that the database names.
    own_url = address_for_itself(settings, settings.port)
    asked = list(dict.fromkeys([own_url, *await _known_boxes(settings)]))
    try:
        secret, own = fleet_key(settings).secret, own_address(settings, settings.port)
    except FleetUnusable:
        return []  # fleet-settings says so
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_S)) as session:
        listed = None
        for url in asked:
            if listed is None:
                listed = await _list(session, url)
        if listed is None:
            text = f"no box of the fleet shows its boxes; asked were {', '.join(asked)}"
            how = "start this server, or wait for a leader; `gpu-pool fleet` shows the boxes then"
            return [Finding("fleet-boxes", "skipped", text, how)]
        facts = await asyncio.gather(*(_ask_box(session, box, secret) for box in listed.boxes))
    return judge_boxes(facts, listed.leader, settings.gpu_pool_node, own)


def judge_boxes(boxes: Sequence[BoxFacts], leader: str | None, node: str, own: str) -> list[Finding]:
    name = "fleet-boxes"
    up = [box for box in boxes if box.view.state == "up"]
    text = f"{len(boxes)} boxes, {len(up)} of them heard of, led by {leader or 'nobody'}"
    found = [Finding(name, "ok" if leader else "problem", text), *judge_versions([box.view for box in up])]
    for box in boxes:
        view = box.view
        if view.state != "up":
            how = "start its server again; a box that will not come back is removed by `gpu-pool fleet forget`"
            found.append(Finding(name, "warning", f"{view.node} is not heard of; nothing is granted there", how))
            continue
        if view.node == node and view.url is not None and view.url != own:
            text = f"{view.url} is a box of the fleet under the name of this one, {node}"
            how = "the second of them is refused: give each its own name with GPU_POOL_NODE"
            found.append(Finding(name, "problem", text, how))
        if box.error is not None:
            how = "check its address (GPU_POOL_FLEET_ADDRESS there) and what is between"
            found.append(
                Finding(name, "warning", f"{view.node} cannot be reached from here at {view.url}: {box.error}", how)
            )
        if box.has_same_key is False:
            found.append(Finding(name, "problem", f"{view.node} has another key", "set the same key on all boxes"))
        if is_far_apart(view.version, __version__):
            text = f"{view.node} has version {view.version}, this box {__version__}: more than one step apart"
            found.append(Finding(name, "problem", text, "update one step at a time, all boxes before the next"))
        found += judge_clock(view.node, box.clock_off_s)
    return found


def judge_versions(boxes: Sequence[BoxView]) -> list[Finding]:
    """Boxes one step apart go together while they are updated."""
    nodes: dict[str, list[str]] = {}
    for box in boxes:
        nodes.setdefault(box.version or "unknown", []).append(str(box.node))
    if len(nodes) < 2:
        return []
    listed = "; ".join(f"{version} on {', '.join(nodes[version])}" for version in sorted(nodes))
    text = f"the boxes have different versions: {listed}"
    how = "that is for the time of an upgrade: upgrade the others too, the leader last"
    return [Finding("fleet-boxes", "warning", text, how)]


def judge_clock(whose: str, off_s: float | None) -> list[Finding]:
    if off_s is None or abs(off_s) <= CLOCK_OFF_S:
        return []
    text = f"the clock of {whose} is {abs(off_s):.0f} s {'ahead of' if off_s > 0 else 'behind'} ours"
    how = "leases do not depend on it, but logs and reports do: let both be set by NTP"
    return [Finding("fleet-clock", "warning", text, how)]


def is_far_apart(one: str | None, other: str) -> bool:
    """Whether two versions differ by more than one step: another major version, or more than one minor one."""
    numbers = [re.match(r"(\d+)\.(\d+)", text or "") for text in (one, other)]
    if numbers[0] is None or numbers[1] is None:
        return False
    (major, minor), (other_major, other_minor) = ([int(part) for part in found.groups()] for found in numbers if found)
    return major != other_major or abs(minor - other_minor) > 1


async def _list(session: object, url: str) -> FleetList | None:
    try:
        async with session.get(f"{url}/fleet", allow_redirects=False) as answer:  # type: ignore[attr-defined]
            return read(FleetList, await answer.json(content_type=None), clean=plain) if answer.status == 200 else None
    except Exception:  # noqa: BLE001 - whatever it is, another box is asked
        return None


async def _ask_box(session: object, box: BoxView, secret: str | None) -> BoxFacts:
    if box.url is None:
        return BoxFacts(box)
    try:
        began = time.time()
        async with session.get(f"{box.url}/livez", allow_redirects=False) as answer:  # type: ignore[attr-defined]
            told = parsedate_to_datetime(answer.headers.get("date", "")).timestamp() + 0.5
            off_s = told - (began + time.time()) / 2
        has_same_key = None
        if secret:
            headers = {HEADER: sign(secret, "POST", RENEW_AT_BOX, _NO_IDS), "content-type": "application/json"}
            # It renews nothing: a box that refuses it has another key.
            async with session.post(f"{box.url}{RENEW_AT_BOX}", data=_NO_IDS, headers=headers) as answer:  # type: ignore[attr-defined]
                has_same_key = {403: False, 200: True}.get(answer.status)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        return BoxFacts(box, plain(str(error) or type(error).__name__))
    return BoxFacts(box, None, off_s, has_same_key)
