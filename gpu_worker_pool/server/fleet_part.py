"""What a box does as one of a fleet: its files are taken up, its agent and its leadership begin, and other boxes can call it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from gpu_worker_pool.core.model.configured import AccessToken
from gpu_worker_pool.core.model.lease import ActiveLease, custodian
from gpu_worker_pool.gpus.simulated import SimulatedProbe
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.ledger.journal import JournalError, JournalInUse

from .agent.agent import Agent
from .agent.custody_store import CustodyStore
from .authority.candidate import Candidate
from .authority.journal_sources import JournalSource, LedElsewhere
from .authority.pool import Pool
from .authority.sole_leader import SoleLeader
from .box.sampler import Sampler
from .fleet import FleetUnusable, address_for_itself, fleet_key, leads_alone, listed_boxes, own_address, spread_s
from .http.forwarded import PassedOnCalls
from .http.tokens import Tokens
from .leader.endpoint import AgentEndpoint
from .routes.renewals import FleetRenewals
from .settings import ServerSettings
from .state_files import custody_path, open_journal

if TYPE_CHECKING:
    from gpu_worker_pool.ledger.postgres.database import PostgresDatabase

# How long a box waits for its leader before it says that it is ready: mostly the leader takes it at once.
FIRST_JOIN_S = 3.0


@dataclass(frozen=True)
class FleetPart:
    """The agent of this box, what other boxes call at it, and where the history of its pool is. `leadership` is None on a box that
    cannot lead.
    """

    pool: Pool
    agent: Agent
    endpoint: AgentEndpoint
    source: JournalSource
    leadership: Candidate | SoleLeader | None

    async def start(self) -> None:
        """Begin, and wait a moment for a leader elsewhere."""
        self.agent.start()
        if self.leadership is None:
            await self.agent.wait_until_joined(FIRST_JOIN_S)

    def added_tokens(self) -> Mapping[str, AccessToken]:
        """The tokens of the pool; on a box that does not lead, those that its leader told last."""
        if self.pool.leads or not self.agent.tokens:
            return self.pool.state.tokens
        return self.agent.tokens


async def join_fleet(
    settings: ServerSettings,
    pool: Pool,
    sampler: Sampler,
    *,
    app: ASGIApp,
    port: int,
    database: PostgresDatabase | None,
    tokens: Tokens,
    renewals: FleetRenewals,
    simulated: SimulatedProbe | None,
    least_fence: int,
) -> FleetPart:
    """Open what this box keeps of its fleet, and take part in it. `app` answers the calls that other boxes pass on. JournalInUse
    if another server takes part with these files, FleetUnusable if they cannot be used.
    """
    leader = pool.leader
    assert leader is not None  # noqa: S101 - it is in a fleet
    key = fleet_key(settings)
    try:
        store = await CustodyStore.open(custody_path(settings))
    except JournalInUse:
        raise
    except JournalError as error:
        raise FleetUnusable(str(error)) from None
    node, url = settings.gpu_pool_node, own_address(settings, port)
    leadership: Candidate | SoleLeader | None = None
    if database is not None:
        leadership = Candidate(pool, leader, database, boot_time, node=node, url=url, spread_s=spread_s(node, url))
    elif leads_alone(settings):
        journal = partial(open_journal, settings)
        leadership = SoleLeader(pool, leader, journal, node=node, url=url, epoch_seen=store.epoch_seen)
    agent = Agent(
        node,
        store,
        sampler,
        url=url,
        own_url=address_for_itself(settings, port),
        key=key,
        serve=renewals.answer_box,
        on_tokens=tokens.end_unknown,
        listed=listed_boxes(settings),
        leadership=leadership,
        simulated=simulated,
        least_fence=least_fence,
    )
    endpoint = AgentEndpoint(
        node,
        key,
        leader,
        partial(_known_leader, pool),
        serve=renewals.answer_box,
        pass_on=PassedOnCalls(app, settings.api_prefix, partial(keeper_of, pool)).answer,
    )
    return FleetPart(pool, agent, endpoint, leadership or LedElsewhere(pool, agent.view), leadership)


def _known_leader(pool: Pool) -> str | None:
    fleet = pool.fleet()
    return None if fleet is None else fleet.leader_url


def keeper_of(pool: Pool, lease_id: str) -> str | None:
    """The box that keeps a lease; None while no box has it."""
    lease = pool.state.leases.get(lease_id)
    return custodian(lease) if isinstance(lease, ActiveLease) else None
