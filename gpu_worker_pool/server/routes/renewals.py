"""Renewals in a fleet: each lease is renewed at the box that keeps it, whichever box is asked.

The box that is asked renews what it keeps itself, also while there is no leader. The rest goes to the leader, which knows where
each lease is, and asks that box; without a leader, to the box that is known to keep it. An id that no box answers for is not
in the answer: its holder asks again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from gpu_worker_pool.core.model.configured import Role
from gpu_worker_pool.core.model.lease import ActiveLease, custodian
from gpu_worker_pool.server.agent.frames import Ask
from gpu_worker_pool.server.agent.link import LinkReply
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.authority.presence import ClientGone
from gpu_worker_pool.server.encoding import encode
from gpu_worker_pool.server.forms import RenewForm
from gpu_worker_pool.server.http.access import Caller, Denied, may_manage
from gpu_worker_pool.server.http.call import Call, until_gone
from gpu_worker_pool.server.http.forwarding import Forwarding
from gpu_worker_pool.server.http.response import RETRY_AFTER, Refusal
from gpu_worker_pool.server.http.tokens import Tokens
from gpu_worker_pool.wire.leases import RenewAnswer
from gpu_worker_pool.wire.pool import RENEW_AT_BOX, BoxRenewAnswer, BoxRenewForm
from gpu_worker_pool.wire.reader import read

if TYPE_CHECKING:
    from gpu_worker_pool.server.agent.agent import Agent

# What another box may take beyond the time that it may hold the answer.
ANSWER_S = 5.0
# How long the answer of one box waits for those of the others. One that is silent must not cost the holder its other leases.
LATE_S = 1.0

# Renews leases here, as a server without a fleet does: the ids, how long to wait, and of which the warning is known.
RenewHere = Callable[[Call, Caller, RenewForm], Awaitable[RenewAnswer]]
# Renews what one box keeps, and waits this long for news; None if it does not answer.
RenewPart = Callable[[str | None, float], Coroutine[Any, Any, RenewAnswer | None]]


class FleetRenewals:
    def __init__(self, pool: Pool, tokens: Tokens, forwarding: Forwarding) -> None:
        self._pool = pool
        self._tokens = tokens
        self._forwarding = forwarding

    async def renew(self, call: Call, form: RenewForm, membership: Agent, renew_here: RenewHere) -> RenewAnswer:
        caller = call.caller()
        kept = await membership.renew(form.ids, self._may(caller))
        self._check(kept, caller)
        # The ids that each box renews; None: those that only the leader can know.
        by_node: dict[str | None, list[str]] = {}
        for lease_id in form.ids:
            node: str | None = membership.node
            if lease_id in kept.elsewhere:
                node = self._keeper(lease_id, membership)
                node = node if node != membership.node and node in membership.boxes else None
            by_node.setdefault(node, []).append(lease_id)

        async def renew_part(node: str | None, wait_s: float) -> RenewAnswer | None:
            less = RenewForm(ids=tuple(by_node[node]), wait_s=wait_s, warned=_within(form.warned, by_node[node]))
            if node == membership.node:
                if not form.wait_s:
                    return kept  # renewed just now
                return await membership.renew(less.ids, self._may(caller), wait_s=wait_s, warned=less.warned)
            if node is not None and (answer := await self._at_box(membership, node, caller, less)) is not None:
                return answer
            return await renew_here(call, caller, less) if membership.is_leader else await self._at_leader(call, less)

        answers = await self._run(tuple(by_node), renew_part, form.wait_s, call)
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
                await reply.begin(200, body=encode(replace(renewing.result(), pool_id=self._pool_id)))
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
    def _check(answer: BoxRenewAnswer, caller: Caller) -> None:
        if answer.denied:
            named = ", ".join(answer.denied[:5])
            you = "" if caller.name is None else f", and you are {caller.name}"
            raise Denied(
                403, f"Only their owner, an operator or an administrator may renew these leases: {named}{you}."
            )

    def _keeper(self, lease_id: str, membership: Agent) -> str | None:
        if membership.leader is not None:
            return None  # it asks the box
        if not membership.is_leader:
            return self._forwarding.keeper_of(lease_id)
        lease = self._pool.state.leases.get(lease_id)
        return custodian(lease) if isinstance(lease, ActiveLease) else None

    async def _at_leader(self, call: Call, form: RenewForm) -> RenewAnswer | None:
        try:
            status, body = await self._forwarding.renew(call, encode(asdict(form)))
        except Refusal as why:
            if why.status in {502, 503}:
                return None
            raise
        if status in {401, 403}:
            raise Denied(401 if status == 401 else 403, str(json.loads(body)["detail"]))
        return read(RenewAnswer, json.loads(body)) if status == 200 else None

    async def _at_box(self, membership: Agent, node: str, caller: Caller, form: RenewForm) -> RenewAnswer | None:
        said = BoxRenewForm(
            ids=form.ids,
            wait_s=form.wait_s,
            warned=form.warned,
            caller=caller.name,
            is_local=caller.is_local,
            is_admin=caller.is_operator,
        )
        body = await membership.ask_box(node, RENEW_AT_BOX, encode(said), form.wait_s + ANSWER_S)
        found = read(BoxRenewAnswer, json.loads(body)) if body else None
        if found is None:
            return None
        self._check(found, caller)
        return None if found.elsewhere else found

    @staticmethod
    async def _run(
        nodes: Sequence[str | None], renew_part: RenewPart, wait_s: float, call: Call
    ) -> list[RenewAnswer | None]:
        """The answers of all boxes. While none has news, all wait; the first that has some ends the waiting. None for a box that
        does not answer then.
        """
        gone = asyncio.ensure_future(until_gone(call.receive))
        call.end_when_revoked(gone)
        tasks = [asyncio.ensure_future(renew_part(node, wait_s)) for node in nodes]
        try:
            await asyncio.wait({*tasks, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not any(task.done() for task in tasks):
                raise ClientGone("The client went away while it waited.")
            late = [number for number, task in enumerate(tasks) if not task.done()]
            if wait_s:  # they hold their answers back
                for number in late:
                    tasks[number].cancel()
                    tasks[number] = asyncio.ensure_future(renew_part(nodes[number], 0.0))
            if late:
                await asyncio.wait([tasks[number] for number in late], timeout=LATE_S)
            return [task.result() if task.done() else None for task in tasks]
        finally:
            gone.cancel()
            for task in tasks:
                task.cancel()


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
