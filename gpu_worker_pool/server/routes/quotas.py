"""The calls about quotas: who may use how much, and who used how much lately."""

from __future__ import annotations

from dataclasses import asdict

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.configured import EVERYBODY_ELSE, Quota
from gpu_worker_pool.core.model.lease import FULL_WEIGHT
from gpu_worker_pool.core.model.state import OwnerUse
from gpu_worker_pool.core.queue.owners import quota_of
from gpu_worker_pool.host.pauses import LoopShare
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.forms import QuotaForm
from gpu_worker_pool.server.http.call import Call
from gpu_worker_pool.server.http.pool_route import ADMIN, PoolRouter
from gpu_worker_pool.server.http.problems import Refusal
from gpu_worker_pool.server.parameters import OwnerInPath
from gpu_worker_pool.server.views.target import Target
from gpu_worker_pool.wire.plans import QuotaList, QuotaView

MAX_QUOTAS = 10_000
# Of the owners without a quota, those with the most use are shown.
MOST_OTHERS = 1_000

router = PoolRouter(tags=("leases",), answered_by="leader")


@router.get("/quotas", ignores_query=True, help="Get the quotas of owners, and their use")
async def quotas(call: Call) -> QuotaList:
    """All quotas."""
    return await quota_list(call.pool, call.target)


@router.put(
    "/quotas/{owner:path}",
    caller=ADMIN,
    tags=("leases", "admin"),
    help="PUT: set the quota of an owner, or of all others (*); DELETE: remove it (admin)",
)
async def set_quota(call: Call, owner: OwnerInPath, form: QuotaForm) -> QuotaView:
    """Set the quota of an owner."""
    pool, quota = call.pool, Quota(**asdict(form))
    if owner not in pool.state.quotas and len(pool.state.quotas) >= MAX_QUOTAS:
        raise Refusal(422, f"There are {MAX_QUOTAS} quotas already, which is the limit; remove one of them first.")
    await pool.command(cmd.Configure("quotas", (owner,), quota))
    return _Uses(pool).view(owner, quota)


@router.delete("/quotas/{owner:path}", caller=ADMIN, tags=("leases", "admin"), problems=(404,))
async def remove_quota(call: Call, owner: OwnerInPath) -> QuotaList:
    """Remove the quota of an owner."""
    call.pool.check_leads()
    if owner not in call.pool.state.quotas:
        raise Refusal(404, f"{owner} has no quota; GET /quotas lists all.")
    await call.pool.command(cmd.Configure("quotas", (owner,)))
    return await quotas(call)


async def quota_list(pool: Pool, target: Target) -> QuotaList:
    """All quotas, which are those of the whole fleet, with the use of their owners and of others. It yields to other work in
    between.
    """
    pool.check_is_open()
    await pool.caught_up()
    state, uses, share = pool.state, _Uses(pool), LoopShare()
    listed = sorted(state.quotas.items())
    others = [(owner, quota_of(state, owner)) for owner in uses.most(MOST_OTHERS)]
    shown: list[QuotaView] = []
    for owner, quota in (*listed, *others):
        shown.append(uses.view(owner, quota))
        await share.yield_if_due()
    return QuotaList(
        node=target.name(pool.node),
        server_id=pool.id,
        fair_share=state.settings.fair_share,
        quotas=tuple(shown[: len(listed)]),
        others=tuple(shown[len(listed) :]),
    )


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


def share_factor(used: float, all_used: float, weight: float, all_weights: float) -> float:
    """1 for an owner that used nothing, 1/2 for one that used exactly its share, less for one that used more."""
    if all_used <= 0:
        return 1.0
    return float(2.0 ** (-(used / all_used) / (weight / all_weights)))
