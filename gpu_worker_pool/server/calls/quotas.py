"""The calls about quotas: who may use how much, and who used how much lately."""

from __future__ import annotations

import re
from dataclasses import asdict

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.configured import EVERYBODY_ELSE, Quota
from gpu_worker_pool.core.model.lease import FULL_WEIGHT
from gpu_worker_pool.core.model.state import OwnerUse
from gpu_worker_pool.core.queue.owners import quota_of
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.http.call import Call, Handlers
from gpu_worker_pool.server.http.loop_share import LoopShare
from gpu_worker_pool.server.http.problems import Refusal
from gpu_worker_pool.server.http.response import Response, encode, encode_with
from gpu_worker_pool.server.http.scope import Scope
from gpu_worker_pool.wire.bounds import MAX_TEXT, is_printable
from gpu_worker_pool.wire.forms import QuotaForm
from gpu_worker_pool.wire.plans import QuotaList, QuotaView
from gpu_worker_pool.wire.strict import parse_form

from .admin import check_admin

MAX_QUOTAS = 10_000
# Those with the most use are shown.
MOST_OTHERS = 1_000
_BLANK = re.compile(r"\s")


class QuotaCalls:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def handlers(self) -> Handlers:
        return {"quotas": self.show, "set_quota": self.set, "remove_quota": self.remove}

    async def show(self, call: Call) -> Response:
        return await self._listed(call)

    async def set(self, call: Call) -> Response:
        form = parse_form(QuotaForm, await check_admin(call))
        owner = _owner(call)
        if form.max_queued == 0:
            raise Refusal(
                422,
                "max_queued is 0, but every request waits for a moment at least; give 1 or more. To keep an owner out, set "
                "gpus to 0.",
            )
        try:
            quota = Quota(**asdict(form))
        except ValueError as error:
            raise Refusal(422, f"{error}.") from None
        if owner not in self._pool.state.quotas and len(self._pool.state.quotas) >= MAX_QUOTAS:
            raise Refusal(422, f"There are {MAX_QUOTAS} quotas already, which is the limit; remove one of them first.")
        await self._pool.command(cmd.Configure("quotas", (owner,), quota))
        return Response(200, encode(_Uses(self._pool).view(owner, quota)))

    async def remove(self, call: Call) -> Response:
        await check_admin(call)
        owner = _owner(call)
        self._pool.check_leads()
        if owner not in self._pool.state.quotas:
            raise Refusal(404, f"{owner} has no quota; GET /quotas lists all.")
        await self._pool.command(cmd.Configure("quotas", (owner,)))
        return await self._listed(call)

    async def encoded(self, scope: Scope) -> bytes:
        """All quotas, which are those of the whole fleet, with the use of their owners and of others. It yields to other work in between."""
        self._pool.check_is_open()
        await self._pool.caught_up()
        state, uses, loop_share = self._pool.state, _Uses(self._pool), LoopShare()
        quotas, others = [], []
        for owner, quota in sorted(state.quotas.items()):
            quotas.append(encode(uses.view(owner, quota)))
            await loop_share.yield_if_due()
        for owner in uses.most(MOST_OTHERS):
            others.append(encode(uses.view(owner, quota_of(state, owner))))
            await loop_share.yield_if_due()
        frame = QuotaList(
            node=scope.name(self._pool.node), server_id=self._pool.id, fair_share=state.settings.fair_share, quotas=()
        )
        return encode_with(frame, quotas=quotas, others=others)

    async def _listed(self, call: Call) -> Response:
        return Response(200, await self.encoded(call.view_scope))


class _Uses:
    """The use of all owners at one instant."""

    def __init__(self, pool: Pool) -> None:
        self._state, self._now = pool.state, pool.now()
        self._used = {owner: use.used_at(self._now) for owner, use in self._state.usage.items()}
        self._all_used = sum(self._used.values())
        sharing = {*self._state.usage, *self._state.queue.owners}
        self._weights = {owner: quota_of(self._state, owner).weight for owner in sharing}
        self._all_weights = sum(self._weights.values())

    def most(self, number: int) -> list[str]:
        """The owners without a quota of their own that used most."""
        without = [owner for owner in self._used if owner is not None and owner not in self._state.quotas]
        return sorted(without, key=lambda owner: (-self._used[owner], owner))[:number]

    def view(self, owner: str, quota: Quota) -> QuotaView:
        if owner == EVERYBODY_ELSE:
            return QuotaView(owner=owner, **asdict(quota))
        use = self._state.usage.get(owner, OwnerUse())
        used = self._used.get(owner, 0.0)
        # A newcomer would share with all others.
        all_weights = self._all_weights + (0.0 if owner in self._weights else quota.weight)
        return QuotaView(
            owner=owner,
            **asdict(quota),
            held_gpus=round(use.held / FULL_WEIGHT, 3),
            queued=self._state.queue.length_of(owner),
            used_gpu_hours=round(used / FULL_WEIGHT / 3600, 3),
            share_factor=round(share_factor(used, self._all_used, quota.weight, all_weights), 4),
        )


def _owner(call: Call) -> str:
    owner = call.parameters["owner"]
    if not owner or len(owner) > MAX_TEXT or not is_printable(owner) or _BLANK.search(owner):
        raise Refusal(
            422,
            f"The owner must be a name of at most {MAX_TEXT} printable characters without blanks, or * for all others.",
        )
    return owner


def share_factor(used: float, all_used: float, weight: float, all_weights: float) -> float:
    """1 for an owner that used nothing, 1/2 for one that used exactly its share, less for one that used more."""
    if all_used <= 0:
        return 1.0
    return float(2.0 ** (-(used / all_used) / (weight / all_weights)))
