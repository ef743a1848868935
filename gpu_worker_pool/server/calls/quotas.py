"""The calls about quotas: who may use how much, and who used how much lately."""

from __future__ import annotations

import re
from dataclasses import asdict

from gpu_worker_pool.core.accounting.fair_share import OwnerUse, factor
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.lease import FULL_WEIGHT
from gpu_worker_pool.core.model.quota import EVERYBODY_ELSE, Quota
from gpu_worker_pool.core.queue.quotas import quota_of
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.http.call import Call, Handlers
from gpu_worker_pool.server.http.problems import Refused
from gpu_worker_pool.server.http.response import Response, encode
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

    async def show(self, _: Call) -> Response:
        self._pool.check_is_open()
        await self._pool.caught_up()
        return self._list()

    async def set(self, call: Call) -> Response:
        form = parse_form(QuotaForm, await check_admin(call))
        owner = _owner(call)
        try:
            quota = Quota(**asdict(form))
        except ValueError as error:
            raise Refused(422, f"{error}.") from None
        if owner not in self._pool.state.quotas and len(self._pool.state.quotas) >= MAX_QUOTAS:
            raise Refused(422, f"There are {MAX_QUOTAS} quotas already, which is the limit; remove one of them first.")
        await self._pool.command(cmd.SetQuota(owner, quota))
        return Response(200, encode(self.view(owner, quota)))

    async def remove(self, call: Call) -> Response:
        await check_admin(call)
        owner = _owner(call)
        if owner not in self._pool.state.quotas:
            raise Refused(404, f"{owner} has no quota; GET /quotas lists all.")
        await self._pool.command(cmd.SetQuota(owner, None))
        return self._list()

    def view(self, owner: str, quota: Quota) -> QuotaView:
        """A quota, with the use of its owner."""
        if owner == EVERYBODY_ELSE:
            return QuotaView(owner=owner, **asdict(quota))
        state, now = self._pool.state, self._pool.now()
        use = state.owners.get(owner, OwnerUse())
        owners = {*state.owners, *state.queue.owners, owner}
        used = {each: state.owners[each].used_at(now) for each in state.owners}
        weights = sum(quota_of(state, each).weight for each in owners)
        share = factor(use.used_at(now), sum(used.values()), quota.weight, weights)
        return QuotaView(
            owner=owner,
            **asdict(quota),
            held_gpus=round(use.held / FULL_WEIGHT, 3),
            queued=state.queue.length_of(owner),
            used_gpu_hours=round(use.used_at(now) / FULL_WEIGHT / 3600, 3),
            share_factor=round(share, 4),
        )

    def _list(self) -> Response:
        state = self._pool.state
        others = sorted(
            ((use.used_at(self._pool.now()), owner) for owner, use in state.owners.items() if owner is not None),
            reverse=True,
        )
        without = [owner for _, owner in others if owner not in state.quotas][:MOST_OTHERS]
        listed = QuotaList(
            fair_share=state.settings.fair_share,
            quotas=tuple(self.view(owner, quota) for owner, quota in sorted(state.quotas.items())),
            others=tuple(self.view(owner, quota_of(state, owner)) for owner in without),
        )
        return Response(200, encode(listed))


def _owner(call: Call) -> str:
    owner = call.parameters["owner"]
    if not owner or len(owner) > MAX_TEXT or not is_printable(owner) or _BLANK.search(owner):
        raise Refused(
            422,
            f"The owner must be a name of at most {MAX_TEXT} printable characters without blanks, or * for all others.",
        )
    return owner
