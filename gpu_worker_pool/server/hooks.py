"""Tells the operator's hooks of what happens in the pool that this server leads, by the rules of the operator's file.

It follows events once they are written, and only puts notices into a bounded queue: no decision waits for a hook.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le, MaxLen, MinLen

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import ActiveLease, EndReason
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.core.queue.eligibility import stale_at
from gpu_worker_pool.core.queue.idleness import idle_s
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.host.state_dir import why_replaceable
from gpu_worker_pool.notify.notice import WARNINGS, Notice, NoticeGpu, Occasion
from gpu_worker_pool.notify.rules import DEFAULT_TIMEOUT_S, AppriseUrl, Program, Rule, check_services
from gpu_worker_pool.notify.sender import Sender

from .authority.pool import Pool
from .forms import STRICT, Number, Text
from .http.response import Refusal
from .http.validation import read_form

logger = logging.getLogger(__name__)

# How often it is looked for GPUs that compute nothing, and for nodes that are not heard of.
LOOK_EVERY_S = 5.0
# What is under way when the server stops may take this time.
FINISH_S = 1.0
# Ends that the holder knows of: it released the lease, or cancelled its request.
_OWN_ENDS = frozenset({EndReason.RELEASED, EndReason.CANCELLED})


class Hooks:
    """Without rules it does nothing, and costs nothing."""

    def __init__(self, pool: Pool, rules: Sequence[Rule], *, reads_every_s: float) -> None:
        self._pool = pool
        self._look_every_s = min(LOOK_EVERY_S, reads_every_s)
        self._rules = tuple(rules)
        self._sender: Sender | None = None
        self._looking: asyncio.Task[None] | None = None
        # Of which the hooks were told, so that they are told once.
        self._idle: set[str] = set()
        self._unknown: set[str] = set()

    def start(self) -> None:
        """Begin to tell. In the event loop of the server."""
        if not self._rules:
            return
        self._sender = Sender(boot_time)
        self._pool.follow(self._follow)
        self._looking = asyncio.ensure_future(self._look_often())

    async def stop(self) -> None:
        """Send what is under way, and end."""
        if self._looking is not None:
            self._looking.cancel()
        sender, self._sender = self._sender, None
        if sender is not None:
            await sender.finish(FINISH_S)

    def _follow(self, events: Sequence[ev.Event]) -> None:
        sender = self._sender
        if sender is None or not self._pool.leads:
            return
        for event in events:
            for notice in self._notices(event):
                sender.tell(notice, self._rules)

    def _notices(self, event: ev.Event) -> Iterator[Notice]:
        state, wall_offset_s = self._pool.state, self._pool.state.wall_offset_s
        match event:
            case ev.LeaseGranted():
                yield self._of_lease(event.lease_id, Occasion.GRANTED, event.at)
            case ev.LeaseWarned():
                if event.reason is not None and (occasion := WARNINGS.get(event.reason)) is not None:
                    if occasion is Occasion.IDLE:
                        self._idle.add(event.lease_id)
                    yield self._of_lease(event.lease_id, occasion, event.at, ends_at=event.ends + wall_offset_s)
            case ev.LeaseEnded():
                self._idle.discard(event.lease_id)
                ended = state.ended.get(event.lease_id)
                was_granted = bool(event.draining) or (ended is not None and ended.granted_at is not None)
                is_own = event.reason in _OWN_ENDS and event.by is None
                for occasion in (() if is_own else (Occasion.LOST,)) + (Occasion.ENDED,) if was_granted else ():
                    yield self._of_lease(
                        event.lease_id, occasion, event.at, reason=event.reason, by=event.by, why=event.why
                    )

    def _of_lease(self, lease_id: str, occasion: Occasion, at: float, **parts: object) -> Notice:
        state = self._pool.state
        lease = state.leases.get(lease_id) or state.ended.get(lease_id)
        request = None if lease is None else lease.request
        return Notice(
            occasion,
            at + state.wall_offset_s,
            lease_id,
            None if request is None else request.holder.owner,
            tuple(map(self._gpu, getattr(lease, "gpus", ()) or ())),
            labels=() if request is None else request.labels,
            **parts,  # type: ignore[arg-type]
        )

    def _gpu(self, key: GpuKey) -> NoticeGpu:
        slot = self._pool.state.slots.get(key)
        gpu = None if slot is None else slot.gpu
        return NoticeGpu(key.node, key.uuid, None if gpu is None else gpu.index)

    async def _look_often(self) -> None:
        while True:
            await asyncio.sleep(self._look_every_s)
            if self._sender is not None and self._pool.leads:
                self._look(self._sender)

    def _look(self, sender: Sender) -> None:
        """Tell of what lasts, once it has begun."""
        state, now = self._pool.state, self._pool.now()
        idle, unknown = idle_leases(state, now), unknown_nodes(state, now)
        for lease_id in sorted(idle - self._idle):
            sender.tell(self._of_lease(lease_id, Occasion.IDLE, now), self._rules)
        for node in sorted(unknown - self._unknown):
            why = "its GPUs have not been read lately"
            sender.tell(Notice(Occasion.NODE_UNKNOWN, self._pool.wall_now(), node=node, why=why), self._rules)
        self._idle, self._unknown = idle, unknown


def idle_leases(state: PoolState, now: float) -> set[str]:
    """The leases whose GPUs compute nothing for as long as the settings say."""
    active = [lease for lease in state.leases.values() if isinstance(lease, ActiveLease)]
    return {lease.id for lease in active if idle_s(state, lease, now) is not None}


def unknown_nodes(state: PoolState, now: float) -> set[str]:
    """The nodes of which no GPU was read lately."""
    known = {
        slot.key.node
        for slot in state.slots.values()
        if slot.reading is not None and now <= stale_at(state, slot.reading)
    }
    return {key.node for key in state.slots} - known


MOST_RULES = 100
Pattern = Annotated[Text, MinLen(1)]


class RulesUnusable(Exception):  # noqa: N818 - what is the matter
    """The file cannot be used. The message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookForm:
    """One [[hook]] of the file."""

    __pydantic_config__ = STRICT

    on: Annotated[tuple[Occasion, ...], MinLen(1), MaxLen(len(Occasion))]
    owner: Pattern | None = None
    node: Pattern | None = None
    url: Text | None = None
    command: Annotated[tuple[Text, ...], MinLen(1), MaxLen(1000)] | None = None
    timeout_s: Annotated[Number, Ge(0.1), Le(300.0)] = DEFAULT_TIMEOUT_S

    def rule(self, number: int) -> Rule:
        """A ValueError where the target cannot be used."""
        target: Program | AppriseUrl
        if (self.url is None) == (self.command is None):
            raise ValueError("give it a url or a command, and not both")
        if self.command is not None:
            if not Path(self.command[0]).is_absolute():
                raise ValueError('command must begin with the path of a program: ["/usr/local/bin/tell"]')
            target = Program(self.command)
        else:
            target = AppriseUrl(self.url or "")
        return Rule(frozenset(self.on), target, self.owner, self.node, self.timeout_s, number)


def read_rules(path: Path) -> tuple[Rule, ...]:
    """All rules of a file; RulesUnusable if one of them cannot be used: half of the rules would look like all."""
    try:
        if (why := why_replaceable(path, {0, os.geteuid()})) is not None:
            raise RulesUnusable(f"other users could change {path}, and so run programs as this server: {why}")
        parsed, mode = tomllib.loads(path.read_text(encoding="utf-8")), path.stat().st_mode
    except OSError as error:
        raise RulesUnusable(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RulesUnusable(f"{path} is not TOML: {error}") from None
    try:
        rules = tuple(_rule(entry, number) for number, entry in enumerate(_entries(parsed), start=1))
        check_services(rules)
    except ValueError as error:
        raise RulesUnusable(f"{path}: {error}") from None
    if mode & stat.S_IROTH and any(isinstance(rule.target, AppriseUrl) for rule in rules):
        raise RulesUnusable(
            f"every user can read {path} (mode {stat.S_IMODE(mode):04o}), and a url is secret; chmod 600 {path}"
        )
    return rules


def load_rules(path: str | None) -> tuple[Rule, ...]:
    """The rules of the operator's file. One that cannot be used is logged as an error, and the server goes on without any."""
    if not path:
        return ()
    try:
        return read_rules(Path(path))
    except RulesUnusable as why:
        logger.error("no hook is told of anything: %s", why)  # noqa: TRY400
        return ()


def _entries(parsed: dict[str, Any]) -> list[dict[str, Any]]:
    entries = parsed.pop("hook", [])
    if parsed:
        raise ValueError(f"{min(parsed)!r} is not known here; there is only [[hook]]")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("hook must be a list: begin each with [[hook]]")
    if len(entries) > MOST_RULES:
        raise ValueError(f"there are {len(entries)} hooks; there must be at most {MOST_RULES}")
    return entries


def _rule(entry: dict[str, Any], number: int) -> Rule:
    try:
        return read_form(HookForm, json.dumps(entry, default=str).encode()).rule(number)
    except (Refusal, ValueError) as error:
        raise ValueError(f"hook {number}: {error}") from None
