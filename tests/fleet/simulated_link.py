"""A connection from an agent to a leader: what is sent arrives in order, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_worker_pool.core.fleet.messages import AgentMessage, LeaderMessage

if TYPE_CHECKING:
    from tests.fleet.simulated_agent import SimulatedAgent
    from tests.fleet.simulated_leader import SimulatedLeader
    from tests.fleet.simulated_world import World


class Link:
    def __init__(self, world: World, agent: SimulatedAgent, leader: SimulatedLeader) -> None:
        world.links += 1
        self.world, self.id, self.agent, self.leader = world, world.links, agent, leader
        self.agent_incarnation, self.leader_incarnation = agent.incarnation, leader.candidate.incarnation
        # When the last message arrives. After one that was lost nothing arrives any more.
        self.up_at = self.down_at = 0.0
        self.is_up_lost = self.is_down_lost = False

    def up(self, message: AgentMessage | None) -> None:
        """To the leader; None: closed."""
        world, candidate = self.world, self.leader.candidate
        if self.is_up_lost or world.is_cut(self.agent.name, candidate.name):
            self.is_up_lost = True
            return
        self.up_at = max(self.up_at, world.now + world.delay())
        act = self.leader.closed if message is None else self.leader.receive
        args = (self,) if message is None else (self, message)
        world.at(self.up_at - world.now, candidate.run, self.leader_incarnation, act, *args)

    def down(self, message: LeaderMessage | None) -> None:
        """To the agent; None: closed."""
        world = self.world
        if self.is_down_lost or world.is_cut(self.leader.candidate.name, self.agent.name):
            self.is_down_lost = True
            return
        self.down_at = max(self.down_at, world.now + world.delay())
        act = self.agent.link_closed if message is None else self.agent.hear
        args = (self,) if message is None else (self, message)
        world.at(self.down_at - world.now, self.agent.run, self.agent_incarnation, act, *args)

    def close_by_agent(self) -> None:
        self.up(None)
        self.is_up_lost = True

    def close_by_leader(self) -> None:
        self.down(None)
        self.is_down_lost = True

    broken_by_agent = close_by_agent
