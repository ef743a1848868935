"""One history of a fleet from one seed: candidates, clocks, a database, boxes and clients, and what goes wrong with them.

To see one: `python -m tests.fleet.simulation --seed 7 --trace`. With `--mutant TEXT`, one guard is missing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from tests.fleet.fleet_checks import check_history, check_leader
from tests.fleet.simulated_agent import SimulatedAgent
from tests.fleet.simulated_candidate import SimulatedCandidate
from tests.fleet.simulated_client import SimulatedClient
from tests.fleet.simulated_database import SimulatedDatabase
from tests.fleet.simulated_world import DATABASE, World

# The last disturbance begins before this time.
TROUBLE_S = 4.0
AT_LEAST_S = 5.0
AT_MOST_S = 16.0


@dataclass(frozen=True)
class Fleet:
    """The parts of a simulation; a mutant replaces one."""

    candidate: type[SimulatedCandidate] = SimulatedCandidate
    database: Callable[[], SimulatedDatabase] = SimulatedDatabase
    agent: type[SimulatedAgent] = SimulatedAgent
    client: type[SimulatedClient] = SimulatedClient


def simulate(seed: int, fleet: Fleet = Fleet(), trace: Callable[[str], None] | None = None) -> World:  # noqa: B008 - it is frozen
    world = World(seed, fleet.database(), fleet.candidate, fleet.agent, trace=trace)
    rng = world.rng
    for candidate in world.candidates:
        world.at(rng.uniform(0.0, 0.2), candidate.start)
    for agent in world.agents.values():
        world.at(rng.uniform(0.0, 0.5), agent.start)
    for number in range(rng.choice((2, 3, 4))):
        client = fleet.client(world, number)
        world.clients.append(client)
        world.at(rng.uniform(0.1, 4.0), client.send)
    trouble = Trouble(world)
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        world.at(rng.uniform(0.3, TROUBLE_S), trouble.strike)
    if rng.random() < 0.03:
        world.at(rng.uniform(0.1, 0.5), trouble.fail_over_after_claim)
    world.run(TROUBLE_S)
    world.slow_share = 0.0
    while world.now < AT_LEAST_S or (world.now < world.disturbed_at + 5.05 and world.now < AT_MOST_S):
        world.run(min(max(AT_LEAST_S, world.disturbed_at + 5.05), AT_MOST_S))
    check_leader(world)
    check_history(world)
    return world


class Trouble:
    """What goes wrong, and when it is over."""

    def __init__(self, world: World) -> None:
        self.world, self.rng = world, world.rng

    def strike(self) -> None:
        kinds = (
            self.kill,
            self.kill,
            self.freeze,
            self.freeze,
            self.cut_off,
            self.cut_off,
            self.cut_clients,
            self.hand_over,
            self.slow_down,
            self.slow_down,
            self.database_down,
            self.fail_over,
            self.fail_over,
            self.fail_over,
            self.fail_over_slowly,
            self.fail_over_after_claim,
            self.set_clock,
            self.kill_agent,
            self.kill_agent,
            self.reboot_box,
            self.freeze_agent,
            self.cut_box,
            self.cut_box,
            self.lose_commits_and_leader,
            self.lose_commits_and_leader,
        )
        self.rng.choice(kinds)()

    def leader(self) -> SimulatedCandidate | None:
        found = [c for c in self.world.candidates if not c.is_dead and not c.is_stopped and c.may_act()]
        return found[0] if found else None

    def victim(self) -> SimulatedCandidate:
        leader = self.leader()
        return leader if leader is not None and self.rng.random() < 0.7 else self.rng.choice(self.world.candidates)

    def then(self, delay_s: float, what: str, action: Callable[[], object]) -> None:
        def over() -> None:
            self.world.disturb(what)
            action()

        self.world.at(delay_s, over)

    def kill(self) -> None:
        victim = self.victim()
        self.world.disturb(f"{victim.name} is killed")
        victim.kill()
        if self.rng.random() < 0.7:
            self.then(self.rng.uniform(0.1, 3.0), f"{victim.name} starts", victim.start_again)

    def freeze(self) -> None:
        victim, world = self.victim(), self.world
        if victim.is_dead or victim.is_stopped:
            return
        world.disturb(f"{victim.name} is stopped")
        if self.rng.random() < 0.5:
            world.freezes_next = victim  # with a question under way
        else:
            victim.freeze()

        def go_on() -> None:
            world.freezes_next = None
            victim.resume()

        self.then(self.rng.uniform(0.3, 6.0), f"{victim.name} goes on", go_on)

    def cut_off(self) -> None:
        """One way or both, from the database; sometimes from the boxes too."""
        victim = self.victim()
        cuts = self.rng.choice(
            (
                {(victim.name, DATABASE)},
                {(DATABASE, victim.name)},
                {(victim.name, DATABASE), (DATABASE, victim.name)},
                {(victim.name, DATABASE), (DATABASE, victim.name), ("boxes", victim.name), (victim.name, "boxes")},
            )
        )
        self.cut(cuts, self.rng.choice((self.rng.uniform(0.5, 5.0), 8.0)))

    def cut_clients(self) -> None:
        victim = self.victim()
        self.cut(self.rng.choice(({("clients", victim.name)}, {(victim.name, "clients")})), self.rng.uniform(0.5, 4.0))

    def cut(self, cuts: set[tuple[str, str]], seconds: float) -> None:
        self.world.disturb(f"cut {sorted(cuts)}")
        self.world.cuts |= cuts
        self.then(seconds, f"heal {sorted(cuts)}", lambda: self.world.cuts.difference_update(cuts))

    def some_agent(self) -> SimulatedAgent:
        return self.world.agents[self.rng.choice(list(self.world.agents))]

    def kill_agent(self) -> None:
        """At once, between two of its next actions, or when it tells an end. It starts again from its disk."""
        agent, share = self.some_agent(), self.rng.random()
        if share < 0.3:
            agent.actions_left = self.rng.randrange(12)
        elif share < 0.6:
            agent.dies_after_an_end = True
        else:
            self.world.disturb(f"the agent of {agent.name} is killed")
            agent.kill()
        self.then(self.rng.uniform(0.2, 5.0), f"the agent of {agent.name} starts", agent.start_again)

    def reboot_box(self) -> None:
        agent = self.some_agent()
        self.world.disturb(f"{agent.name} reboots")
        agent.reboot()
        self.then(self.rng.uniform(0.5, 4.0), f"{agent.name} is up", agent.start_again)

    def freeze_agent(self) -> None:
        agent = self.some_agent()
        self.world.disturb(f"the agent of {agent.name} is stopped")
        agent.freeze()
        self.then(self.rng.uniform(0.5, 6.0), f"the agent of {agent.name} goes on", agent.resume)

    def cut_box(self) -> None:
        """One way or both, from every leader."""
        name = self.some_agent().name
        ways = ({(name, "leader")}, {("leader", name)}, {(name, "leader"), ("leader", name)})
        self.cut(self.rng.choice(ways), self.rng.uniform(0.5, 6.0))

    def lose_commits_and_leader(self) -> None:
        """Nobody is left that knows what the database lost, except the boxes."""
        world, others = self.world, self.world.candidates
        self.fail_over()
        for candidate in others:
            candidate.kill()
            self.then(self.rng.uniform(0.1, 1.5), f"{candidate.name} starts", candidate.start_again)
        world.disturb("all candidates are killed")

    def hand_over(self) -> None:
        victim = self.victim()
        if victim.is_dead or victim.is_stopped:
            return
        self.world.disturb(f"{victim.name} stops cleanly")
        victim.stop()
        self.then(self.rng.uniform(1.0, 3.0), f"{victim.name} starts", victim.start_again)

    def slow_down(self) -> None:
        """Statements and answers take long, and overtake each other."""
        self.world.disturb("the network is slow")
        self.world.slow_share = self.rng.uniform(0.05, 0.3)

        def over() -> None:
            self.world.slow_share = 0.0

        self.then(self.rng.uniform(0.5, 4.0), "the network is fast again", over)

    def database_down(self) -> None:
        database = self.world.database
        self.world.disturb("the database is down")
        database.is_up = False

        def up() -> None:
            database.is_up = True

        self.then(self.rng.choice((self.rng.uniform(0.2, 4.0), 8.0)), "the database is up", up)

    def fail_over(self, behind_s: float | None = None) -> None:
        """A standby that is any time behind is promoted: what was promised meanwhile, only the boxes know."""
        world = self.world
        behind_s = self.rng.uniform(0.0, 3.0) if behind_s is None else behind_s
        lost = world.database.fail_over(world.now, behind_s)
        world.can_expire_early = True
        world.disturb(f"the database fails over to a standby {behind_s:.2f} s behind; {lost} events are lost")

    def fail_over_after_claim(self) -> None:
        """The standby does not have the last claim."""
        world = self.world
        since_s = world.now - world.database.claimed_at
        if since_s < 3.0:
            self.fail_over(since_s + 0.001)

    def fail_over_slowly(self) -> None:
        """A standby is promoted so late that nobody leads by then."""
        self.fail_over(self.rng.uniform(0.05, 0.7))
        database = self.world.database
        database.is_up = False

        def up() -> None:
            database.is_up = True

        self.then(self.rng.uniform(2.5, 4.5), "the standby is promoted", up)

    def set_clock(self) -> None:
        database, world = self.world.database, self.world
        seconds = self.rng.choice((-30.0, self.rng.uniform(-3.0, 0.0), self.rng.uniform(0.0, 1.0)))
        database.clock_offset_s += seconds
        world.disturb(f"the database's clock is set by {seconds:.2f} s")
        # A leadership that is left lasts for longer.
        world.disturbed_at += min(max(-seconds, 0.0), 3.0)
        world.set_forward_s += max(seconds, 0.0)
        world.was_set_back = world.was_set_back or seconds < 0
        world.can_expire_early = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--mutant", help="a part of the guard's name, see fleet_mutants.py")
    arguments = parser.parse_args()
    fleet = Fleet()
    if arguments.mutant is not None:
        from tests.fleet.fleet_mutants import MUTANTS  # noqa: PLC0415 - it imports this module

        fleet = next(mutant.fleet for mutant in MUTANTS if arguments.mutant in mutant.guard)
    world = simulate(arguments.seed, fleet, trace=print if arguments.trace else None)
    print(f"{len(world.database.events)} events, {len(world.take_overs)} take-overs, {world.now:.1f} s: as promised")  # noqa: T201


if __name__ == "__main__":
    main()
