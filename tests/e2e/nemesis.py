"""Workers, a server, a bad network between them, strangers beside them, and a nemesis that breaks them all.

`run` starts them, lets the nemesis loose for a while, heals everything, lets the pool go on in calm for longer than the longest
TTL, ends the workers, and returns the history (see tests/e2e/history_check.py). The schedule of the faults, what each
worker wants and what the network does to a request are drawn from the seed; which request meets which fault is up to the
machine, so a seed repeats the weather and not the run. The nemesis waits as part of its schedule, never to let something finish.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from math import inf
from pathlib import Path

from tests.e2e.faults.scene import Fault, Plan, Scene
from tests.e2e.faults.second_server import SecondServer
from tests.e2e.faults.server import ServerFaults
from tests.e2e.faults.strangers import Strangers
from tests.e2e.faults.workers import Crew
from tests.e2e.run_history import RunHistory, read_history
from tests.e2e.worker import NoAnswer, now

# These take long, so they begin first.
FIRST = ("outsiders", "outage", "flood")


class Nemesis:
    """One run."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.scene = Scene(plan, folder)
        self.recorder = self.scene.recorder
        self.crew = Crew(self.scene)
        self.second = SecondServer(self.scene)
        self.server = ServerFaults(self.scene, self.crew, self.second)
        self.strangers = Strangers(self.scene, self.crew)
        of_server = self.server.faults()
        self.needs_server = frozenset({*of_server, *self.second.faults()} - {"outage"})
        self.faults: dict[str, Fault] = {
            **of_server,
            **self.crew.faults(),
            "cut_network": self.cut_network,
            **self.strangers.faults(),
            **self.second.faults(),
        }

    async def run(self) -> None:
        keeper = None
        try:
            assert await self.scene.server.come_up(), "the server did not start"
            await self.scene.proxy.start()
            for role in self.plan.roles():
                self.crew.start(role)
            keeper = asyncio.ensure_future(self.server.keep_up())
            self.scene.proxy.badness = self.plan.badness
            onlooker = asyncio.ensure_future(self.look_on())
            await self.rage()
            onlooker.cancel()
            await self.heal()
            self.recorder.say("calm")
            await asyncio.sleep(self.plan.calm_s)
            await self.crew.end([*self.crew.workers])
            await self.look_at_the_end()
        finally:
            self.server.is_over = True
            if keeper is not None:
                await keeper
            self.clean_up()
            await self.scene.proxy.stop()
            self.recorder.counts.update(self.scene.proxy.counts)
            self.recorder.close()

    async def rage(self) -> None:
        """Every fault once, in a drawn order, then those of workers more often, as long as there is time. Nothing is done
        to a server that is away for long or has a flood to answer, and nothing again to one that is not well.
        """
        random, ends_at = self.scene.random, now() + self.plan.chaos_s
        to_come = [name for name in self.faults if name not in FIRST]
        often = [*to_come, "outsiders", "flood", *["kill_worker"] * 4, *["stop_worker"] * 2]
        random.shuffle(to_come)
        to_come += random.sample(FIRST, len(FIRST))
        while now() < ends_at or to_come:
            is_first = bool(to_come)
            name = to_come.pop() if is_first else random.choice(often)
            is_busy = self.server.is_away or self.strangers.is_flooding
            if name in self.needs_server and (is_busy or not (is_first or self.scene.server.is_well)):
                if is_first:
                    to_come.insert(0, name)
                name = "kill_worker"
            self.scene.begin(self.faults[name]())
            await asyncio.sleep(random.uniform(0.4, 1.2))

    async def cut_network(self) -> None:
        """For all; what happens to a single request is in proxy.py."""
        self.recorder.say("network_cut")
        self.scene.proxy.is_cut = True
        self.scene.proxy.cut()
        await asyncio.sleep(self.scene.random.uniform(0.1, 1.5))
        self.scene.proxy.is_cut = False

    async def look_on(self) -> None:
        """Watch all leases that wait, with curl, and press Ctrl-C; a client that asks again on a new connection before
        the server sees that its old one is gone does the same. It is nobody else's business.
        """
        server, random = self.scene.server, self.scene.random
        while True:
            await asyncio.sleep(random.uniform(0.1, 0.5))
            try:
                _, pool = await server.look_up("/pool")
            except NoAnswer:
                continue
            queue = random.sample(pool["queue"], min(len(pool["queue"]), 20))
            watching = [server.look_up(f"/leases/{lease['id']}?wait_s=10", 0.2) for lease in queue]
            seen = await asyncio.gather(*watching, return_exceptions=True)
            self.recorder.counts["onlooker_hung_up"] += sum(isinstance(answer, NoAnswer) for answer in seen)

    async def heal(self) -> None:
        """All faults run out, and nothing new is done to anybody."""
        self.scene.proxy.badness = 0.0
        self.scene.is_healing.set()
        await asyncio.gather(*self.scene.tasks)
        await self.server.heal()

    async def look_at_the_end(self) -> None:
        """All gave back what they had; only the leases of the dead may run out their TTL, and the calm was longer."""
        state: tuple[list[str], list[str]] = ([], [])
        gives_up_at = now() + 3.0
        while now() < gives_up_at:
            _, pool = await self.scene.server.look_up("/pool")
            left = [f"{lease['id']} is still {lease['state']}" for lease in pool["leases"] + pool["queue"]]
            state = (left, [gpu["state"] for gpu in pool["gpus"]])
            if not state[0] and set(state[1]) == {"free"}:
                break
            await asyncio.sleep(0.05)
        self.recorder.say("final", leases=state[0], gpus=state[1])

    def clean_up(self) -> None:
        for task in self.scene.tasks:
            task.cancel()
        self.crew.clean_up()
        self.strangers.clean_up()
        self.second.clean_up()
        self.scene.server.close()


def run(plan: Plan, folder: Path) -> tuple[RunHistory, Counter[str]]:
    """A whole run in this empty folder: what happened, and how often what was done."""
    folder.mkdir(parents=True, exist_ok=True)
    nemesis = Nemesis(plan, folder)
    asyncio.run(nemesis.run())
    history = read_history(folder)
    counts = nemesis.recorder.counts
    counts["grants"] = len(history.tenures)
    counts["shares_granted"] = sum(lease.who.startswith("flood") for lease in history.tenures)
    counts["renewals"] = sum(line["what"] == "renewed" for line in history.lines)
    counts["calls_without_answer"] = sum(line["what"] == "failed" for line in history.lines)
    counts["gave_up_first"] = sum(line.get("why") == "gave up" for line in history.lines)
    counts.update(held_through_outages(history))
    return history, counts


def held_through_outages(history: RunHistory) -> Counter[str]:
    """How many local holders kept their GPU through an outage, and how many remote ones gave theirs up in it."""
    counts: Counter[str] = Counter()
    back = [line["at"] for line in history.of_kind("server_back")]
    for away_at, back_at in zip((line["at"] for line in history.of_kind("server_away")), back, strict=True):
        for lease in history.tenures:
            if lease.took_at < away_at < lease.left_at:
                counts["held_through_outage"] += lease.safe_until == inf and lease.left_at > back_at
                counts["given_up_in_outage"] += lease.safe_until < back_at and away_at < lease.left_at < back_at
    return counts
