"""Renewals in a fleet: each lease is renewed at the box that keeps it, whichever box is asked.

The box that is asked renews what it keeps itself, also while there is no leader. The rest goes to the leader, which knows where
each lease is, and asks that box; without a leader, to the box that is known to keep it. An id that no box answers for is not
in the answer: its holder asks again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple

from gpu_worker_pool.core.model.configured import Role
from gpu_worker_pool.core.model.lease import ActiveLease, custodian
from gpu_worker_pool.server.agent.frames import Ask
from gpu_worker_pool.server.agent.link import LinkReply
from gpu_worker_pool.server.agent.renewals import BoxRenewal
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.authority.presence import ClientGone
from gpu_worker_pool.server.encoding import encode
from gpu_worker_pool.server.forms import RenewForm
from gpu_worker_pool.server.http.access import Caller, Denied, may_manage
from gpu_worker_pool.server.http.call import Call, until_gone
from gpu_worker_pool.server.http.forwarding import Forwarding
from gpu_worker_pool.server.http.problems import RETRY_AFTER, Refusal
from gpu_worker_pool.server.http.tokens import Tokens
from gpu_worker_pool.wire.fleet import RENEW_AT_BOX, BoxRenewAnswer, BoxRenewForm
from gpu_worker_pool.wire.leases import RenewAnswer
from gpu_worker_pool.wire.reader import read

if TYPE_CHECKING:
    from gpu_worker_pool.server.agent.agent import Agent

# What another box may take beyond the time that it may hold the answer.
ANSWER_S = 5.0
# How long the answer of one box waits for those of the others. One that is silent must not cost the holder its other leases.
LATE_S = 1.0

# Renews leases here, as a server without a fleet does: the ids, how long to wait, and of which the warning is known.
RenewHere = Callable[[Call, Caller, RenewForm], Awaitable[RenewAnswer]]


class Part(NamedTuple):
    """Ids that one box renews, and how: with how long to wait. It returns None if that box does not answer."""

    ids: tuple[str, ...]
    run: Callable[[float], Awaitable[RenewAnswer | None]]


class FleetRenewals:
    def __init__(self, pool: Pool, tokens: Tokens, forwarding: Forwarding) -> None:
        self._pool = pool
        self._tokens = tokens
        self._forwarding = forwarding

    async def renew(self, call: Call, form: RenewForm, membership: Agent, renew_here: RenewHere) -> RenewAnswer:
        caller = call.caller()
        kept = await membership.renew(form.ids, self._may(caller))
        self._check(kept.denied, caller)
        parts = self._parts(call, caller, form, membership, kept, renew_here)
        answers = await self._run(parts, form, call)
        if not any(answers):
            raise Refusal(
                503,
                f"These leases cannot be renewed now: {membership.why_waiting or 'the box that keeps them does not answer'}. "
                "Ask again.",
                RETRY_AFTER,
            )
        return _together(filter(None, answers), self._pool_id)

    async def answer_box(self, ask: Ask, body: bytes, reply: LinkReply) -> None:
        """Answer a box that asks this one on their link: it renews leases for a caller that it knows."""
        membership = self._pool.membership
        if membership is None or ask.target != RENEW_AT_BOX:
            await reply.begin(404)
            return
        said = read(BoxRenewForm, json.loads(body)) or BoxRenewForm(ids=())
        caller = Caller(said.caller, said.is_local, Role.OPERATOR if said.is_admin else Role.USER)
        renewing = asyncio.ensure_future(
            membership.renew(said.ids, self._may(caller), wait_s=said.wait_s, warned=said.warned)
        )
        try:
            await asyncio.wait((renewing, reply.gone), return_when=asyncio.FIRST_COMPLETED)
            if renewing.done():
                kept = renewing.result()
                answer = BoxRenewAnswer(
                    renewed=kept.renewed,
                    lost=kept.lost,
                    held_s=kept.held_s,
                    pool_id=self._pool_id,
                    elsewhere=kept.elsewhere,
                    denied=tuple(f"{id_} (of {owner})" for id_, owner in kept.denied),
                )
                await reply.begin(200, body=encode(answer))
        finally:
            renewing.cancel()

    @property
    def _pool_id(self) -> str | None:
        """A box knows its fleet also by the leader that it has or had: there may be no journal that can be read."""
        membership = self._pool.membership
        return self._pool.pool_id or (membership.pool_id if membership is not None else None)

    def _may(self, caller: Caller) -> Callable[[str | None], bool]:
        return lambda owner: may_manage(caller, owner, self._tokens)

    @staticmethod
    def _check(denied: Sequence[tuple[str, str | None]], caller: Caller) -> None:
        if denied:
            named = ", ".join(f"{id_} (of {owner})" for id_, owner in denied[:5])
            you = "" if caller.name is None else f", and you are {caller.name}"
            raise Denied(
                403, f"Only their owner, an operator or an administrator may renew these leases: {named}{you}."
            )

    def _parts(  # noqa: PLR0917 - what a renewal consists of
        self,
        call: Call,
        caller: Caller,
        form: RenewForm,
        membership: Agent,
        kept: BoxRenewal,
        renew_here: RenewHere,
    ) -> list[Part]:
        """Who renews which of the ids."""
        here = tuple(id_ for id_ in form.ids if id_ not in set(kept.elsewhere))
        by_node: dict[str | None, list[str]] = {}
        for lease_id in kept.elsewhere:
            node = self._keeper(lease_id, membership)
            known = node != membership.node and node in membership.boxes
            by_node.setdefault(node if known else None, []).append(lease_id)
        parts = []
        if here:

            async def at_home(wait_s: float) -> RenewAnswer:
                # Just now, without waiting, they have been renewed already.
                is_done = not form.wait_s
                return self._answer(kept) if is_done else await self._renew_kept(here, caller, membership, form, wait_s)

            parts.append(Part(here, at_home))
        for node, found in by_node.items():
            ids = tuple(found)

            async def at_leader(wait_s: float, ids: tuple[str, ...] = ids) -> RenewAnswer | None:
                less = RenewForm(ids=ids, wait_s=wait_s, warned=_within(form.warned, ids))
                if membership.is_leader:
                    return await renew_here(call, caller, less)
                return await self._at_leader(call, less)

            async def at_box(
                wait_s: float, ids: tuple[str, ...] = ids, node: str | None = node, otherwise: RenewPart = at_leader
            ) -> RenewAnswer | None:
                answer = await self._at_box(membership, node or "", caller, ids, form, wait_s)
                return await otherwise(wait_s) if answer is None else answer

            parts.append(Part(ids, at_leader if node is None else at_box))
        return parts

    def _keeper(self, lease_id: str, membership: Agent) -> str | None:
        if membership.leader is not None:
            return None  # it asks the box
        if not membership.is_leader:
            return self._forwarding.keeper_of(lease_id)
        lease = self._pool.state.leases.get(lease_id)
        return custodian(lease) if isinstance(lease, ActiveLease) else None

    async def _renew_kept(
        self, ids: tuple[str, ...], caller: Caller, membership: Agent, form: RenewForm, wait_s: float
    ) -> RenewAnswer:
        warned = _within(form.warned, ids)
        return self._answer(await membership.renew(ids, self._may(caller), wait_s=wait_s, warned=warned))

    def _answer(self, kept: BoxRenewal) -> RenewAnswer:
        return RenewAnswer(renewed=kept.renewed, lost=kept.lost, held_s=kept.held_s, pool_id=self._pool_id)

    async def _at_leader(self, call: Call, form: RenewForm) -> RenewAnswer | None:
        try:
            # What is as by default is left out: a leader of the version before may not know it.
            status, body = await self._forwarding.renew(
                call, encode({key: said for key, said in asdict(form).items() if said})
            )
        except Refusal as why:
            if why.status in {502, 503}:
                return None
            raise
        if status in {401, 403}:
            raise Denied(401 if status == 401 else 403, str(json.loads(body)["detail"]))
        return read(RenewAnswer, json.loads(body)) if status == 200 else None

    async def _at_box(  # noqa: PLR0917 - as above
        self, membership: Agent, node: str, caller: Caller, ids: tuple[str, ...], form: RenewForm, wait_s: float
    ) -> RenewAnswer | None:
        said = BoxRenewForm(
            ids=ids,
            wait_s=wait_s,
            warned=_within(form.warned, ids),
            caller=caller.name,
            is_local=caller.is_local,
            is_admin=caller.is_operator,
        )
        body = await membership.ask_box(node, RENEW_AT_BOX, encode(said), wait_s + ANSWER_S)
        found = read(BoxRenewAnswer, json.loads(body)) if body else None
        if found is None:
            return None
        if found.denied:
            raise Denied(
                403,
                f"Only their owner, an operator or an administrator may renew these leases: {', '.join(found.denied[:5])}.",
            )
        return None if found.elsewhere else found

    async def _run(self, parts: Sequence[Part], form: RenewForm, call: Call) -> list[RenewAnswer | None]:
        """The answers of all parts. While no part has news, all wait; the first that has some ends the waiting. None for a
        part that does not answer then.
        """
        gone = asyncio.ensure_future(until_gone(call.receive))
        call.end_when_revoked(gone)
        tasks = [asyncio.ensure_future(part.run(form.wait_s)) for part in parts]
        try:
            await asyncio.wait({*tasks, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not any(task.done() for task in tasks):
                raise ClientGone("The client went away while it waited.")
            late = [number for number, task in enumerate(tasks) if not task.done()]
            if form.wait_s:  # they hold their answers back
                for number in late:
                    tasks[number].cancel()
                    tasks[number] = asyncio.ensure_future(parts[number].run(0.0))
            if late:
                await asyncio.wait([tasks[number] for number in late], timeout=LATE_S)
            return [task.result() if task.done() else None for task in tasks]
        finally:
            gone.cancel()
            for task in tasks:
                task.cancel()


RenewPart = Callable[[float], Awaitable[RenewAnswer | None]]


def _within(ids: Iterable[str], some: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(ids) & set(some)))


def _together(answers: Iterable[RenewAnswer], pool_id: str | None) -> RenewAnswer:
    found = list(answers)
    return RenewAnswer(
        renewed=tuple(each for answer in found for each in answer.renewed),
        lost=tuple(each for answer in found for each in answer.lost),
        held_s=min((answer.held_s or 0.0) for answer in found),
        pool_id=next((answer.pool_id for answer in found if answer.pool_id), pool_id),
    )
