"""Breaks a fleet: its leader, its boxes, its database, the networks between them, and its workers.

The schedule, what is broken and for how long are drawn from the seed; which request meets which fault is up to the machine, so
a seed repeats the weather and not the run. Faults overlap. The nemesis waits as part of its schedule.
"""

from __future__ import annotations

import heapq
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from tests.e2e.history_check import Violation, check
from tests.e2e.worker import now
from tests.ledger.postgres.server import PostgresServer

from .fleet import Box, until
from .journal_check import FleetHistory, check_fleet, take_overs
from .scene import Scene, SceneBox, reboot_prefix, roles_of

HEAD = "SELECT head FROM gpu_pool.leader"

Undo = Callable[[], None]


@dataclass
class FleetPlan:
    """`kinds` of faults, in a drawn order, each once and then again while `chaos_s` last. None: all."""

    seed: int
    chaos_s: float = 6.0
    calm_s: float = 4.0
    ttl_s: float = 3.0
    most_s: float = 8.0
    pause_s: float = 1.0
    kinds: Sequence[str] | None = None
    # Let a leader that is broken while all else is well stay so, and break nothing else, until another one must have granted.
    measured_s: float = 0.0
    # After the calm, wait for up to so long until each request that waits then has come to an end.
    served_s: float = 0.0


@dataclass
class Report:
    """What was done, and what came of it."""

    counts: Counter[str]
    violations: list[Violation]
    # After a leader that was killed, frozen, cut off or told to stop.
    take_overs_s: list[float]
    history: FleetHistory


class FleetNemesis:
    """One run in a scene that has started."""

    def __init__(self, plan: FleetPlan, scene: Scene) -> None:
        self.plan = plan
        self.scene = scene
        self.random = random.Random(plan.seed)
        self.counts: Counter[str] = Counter()
        # Nothing more is done to these for now.
        self.broken: set[SceneBox | str] = set()
        self.leader_broken_at: list[float] = []
        self.is_measured = False
        self.kinds: dict[str, Callable[[], Undo | None]] = {
            "kill_leader": self.kill_leader,
            "hand_over": self.hand_over,
            "stop_leader": self.stop_leader,
            "cut_boxes_from_leader": partial(self.cut_network, "cut", of_leader=True),
            "lose_requests_to_leader": partial(self.cut_network, "stop_requests", of_leader=True),
            "lose_answers_of_leader": partial(self.cut_network, "stop_answers", of_leader=True),
            "cut_network_of_box": partial(self.cut_network, "cut", of_leader=False),
            "kill_box": self.kill_box,
            "stop_box": self.stop_box,
            "duplicate_box": self.duplicate_box,
            "duplicate_dead_box": self.duplicate_dead_box,
            "kill_worker": self.kill_worker,
        }
        if scene.has_database:
            self.kinds |= {
                "cut_leader_from_database": partial(self.cut_leader, "cut"),
                "lose_requests_of_leader": partial(self.cut_leader, "stop_requests"),
                "lose_answers_to_leader": partial(self.cut_leader, "stop_answers"),
                "kill_database": self.kill_database,
                "stop_database": self.stop_database,
            }
        if reboot_prefix() is not None:
            self.kinds |= {"reboot_box": self.reboot_box, "reboot_leader": partial(self.reboot_box, leads=True)}
        if scene.standby is not None:
            self.kinds["promote_standby"] = self.promote_standby

    def rage(self) -> None:
        """Each kind of fault once, then any of them while there is time, and heal all."""
        numbers = count()
        to_come = list(self.plan.kinds or self.kinds)
        self.random.shuffle(to_come)
        undo: list[tuple[float, int, Undo]] = []
        ends_at, next_at = now() + self.plan.chaos_s, now()
        gives_up_at = ends_at + 60.0
        while (now() < ends_at or to_come) and now() < gives_up_at:
            if undo and undo[0][0] <= now():
                heapq.heappop(undo)[2]()
            elif next_at <= now():
                kind = to_come.pop(0) if to_come else self.random.choice([*(self.plan.kinds or self.kinds)])
                done = self.kinds[kind]()
                next_at = now() + self.random.uniform(0.2, 2 * self.plan.pause_s)
                lasts_s = self.random.uniform(0.5, self.plan.most_s)
                if self.is_measured:
                    self.is_measured = False
                    next_at, lasts_s = next_at + self.plan.measured_s, lasts_s + self.plan.measured_s
                    # The end heals all: a leader that is well again too early needs no other one.
                    ends_at = max(ends_at, now() + self.plan.measured_s)
                if done is None:
                    # It cannot be done now: no box leads, say, or another fault is in its way.
                    to_come += [kind] if self.counts[kind] == 0 else []
                else:
                    self.counts[kind] += 1
                    heapq.heappush(undo, (now() + lasts_s, next(numbers), done))
            else:
                self.scene.keep_up(but=[box for box in self.scene.boxes if box in self.broken])
                time.sleep(0.02)
        while undo:
            heapq.heappop(undo)[2]()
        self.counts["faults_that_did_not_come"] += len(set(to_come))

    # --- the leader --------------------------------------------------------------------------------------------------

    def pick_leader(self) -> SceneBox | None:
        if "failover" in self.broken:
            return None
        leader = self.scene.leader(but=[box for box in self.scene.boxes if box in self.broken])
        if leader is not None:
            self.broken.add(leader)
        return leader

    def note_leader_broken(self, leader: SceneBox) -> None:
        """A take-over is measured if all else is well: a box that was started just now cannot lead yet."""
        self.scene.say("leader_broken", node=leader.node)
        others = [box for box in self.scene.boxes if box.is_candidate and box is not leader]
        is_well = self.broken == {leader} and all(box.role() == "follower" for box in others)
        if self.plan.measured_s and is_well:
            self.is_measured = True
            self.leader_broken_at.append(now())

    def kill_leader(self) -> Undo | None:
        if (leader := self.pick_leader()) is None:
            return None
        self.note_leader_broken(leader)
        leader.kill()
        return partial(self.launch, leader)

    def hand_over(self) -> Undo | None:
        if (leader := self.pick_leader()) is None:
            return None
        self.note_leader_broken(leader)
        leader.send(signal.SIGTERM)
        return partial(self.launch, leader)

    def stop_leader(self) -> Undo | None:
        if (leader := self.pick_leader()) is None:
            return None
        self.note_leader_broken(leader)
        leader.send(signal.SIGSTOP)
        return partial(self.go_on, leader)

    def cut_leader(self, how: str) -> Undo | None:
        """From its database, silently: one way or both."""
        if (leader := self.pick_leader()) is None:
            return None
        self.note_leader_broken(leader)
        for proxy in leader.databases:
            getattr(proxy, how)()
        return partial(self.restore, leader)

    # --- boxes -------------------------------------------------------------------------------------------------------

    def pick_box(self, *, leads: bool | None = None) -> SceneBox | None:
        if "failover" in self.broken:
            return None
        if leads:
            return self.pick_leader()
        leader = self.scene.leader(but=[box for box in self.scene.boxes if box in self.broken])
        boxes = [box for box in self.scene.boxes if box not in self.broken and box is not leader]
        if not boxes:
            return None
        box = self.random.choice(boxes)
        self.broken.add(box)
        return box

    def cut_network(self, how: str, *, of_leader: bool) -> Undo | None:
        """From the other boxes. A leader that only its own box reaches still leads: the database is its judge."""
        if (box := self.pick_box(leads=of_leader)) is None:
            return None
        getattr(box.network, how)()
        return partial(self.restore, box)

    def kill_box(self) -> Undo | None:
        if (box := self.pick_box()) is None:
            return None
        box.kill()
        return partial(self.launch, box)

    def stop_box(self) -> Undo | None:
        if (box := self.pick_box()) is None:
            return None
        box.send(signal.SIGSTOP)
        return partial(self.go_on, box)

    def reboot_box(self, *, leads: bool | None = None) -> Undo | None:
        """Its processes end with it."""
        if (box := self.pick_box(leads=leads)) is None:
            return None
        if leads:
            self.note_leader_broken(box)
        box.kill()
        for name in self.scene.workers_of(box):
            self.scene.kill_worker(name)
        box.reboot()
        return partial(self.broken.discard, box)

    def duplicate_box(self) -> Undo | None:
        if (box := self.pick_box()) is None:
            return None
        return partial(self.end_twin, self.scene.add_twin(box), box)

    def duplicate_dead_box(self) -> Undo | None:
        if (box := self.pick_box()) is None:
            return None
        box.kill()
        return partial(self.end_twin, self.scene.add_twin(box), box)

    def end_twin(self, twin: Box, box: SceneBox) -> None:
        twin.kill()
        self.broken.discard(box)

    # --- the database ------------------------------------------------------------------------------------------------

    def kill_database(self) -> Undo | None:
        if self.broken & {"database", "failover"}:
            return None
        self.broken.add("database")
        self.scene.database.kill()
        return self.start_database

    def start_database(self) -> None:
        self.scene.database.start()
        self.broken.discard("database")

    def stop_database(self) -> Undo | None:
        """All its processes, so that connections stay and nothing is answered."""
        if self.broken & {"database", "failover"}:
            return None
        self.broken.add("database")
        self.scene.database.send_to_all(signal.SIGSTOP)
        return self.continue_database

    def continue_database(self) -> None:
        self.scene.database.send_to_all(signal.SIGCONT)
        self.broken.discard("database")

    def promote_standby(self) -> Undo | None:
        """The primary dies, and its synchronous standby, which has all, is promoted."""
        standby = self.scene.standby
        if standby is None or self.broken or self.scene.leader() is None:
            return None
        self.broken.add("failover")
        primary = self.scene.database
        primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        primary.execute("SELECT pg_reload_conf()")
        until(lambda: primary.execute("SELECT sync_state FROM pg_stat_replication") == "sync", "it is synchronous")
        return partial(self.fail_over, standby)

    def fail_over(self, standby: PostgresServer) -> None:
        head = int(self.scene.database.execute(HEAD, self.scene.name))
        self.scene.database.kill()
        standby.promote()
        self.counts["commits_lost"] += max(head - int(standby.execute(HEAD, self.scene.name)), 0)
        self.scene.database, self.scene.standby = standby, None
        self.kinds.pop("promote_standby")
        self.broken.discard("failover")

    # --- the others --------------------------------------------------------------------------------------------------

    def kill_worker(self) -> Undo | None:
        self.scene.kill_worker(self.random.choice(sorted(self.scene.workers)))
        return lambda: None

    def launch(self, box: SceneBox) -> None:
        box.launch()
        self.broken.discard(box)

    def go_on(self, box: SceneBox) -> None:
        if box.is_running:
            box.send(signal.SIGCONT)
        self.broken.discard(box)

    def restore(self, box: SceneBox) -> None:
        for proxy in (box.network, *box.databases):
            proxy.restore()
        self.broken.discard(box)


def run(plan: FleetPlan, scene: Scene) -> Report:
    """Break a scene that has started, heal it, let it work in calm for longer than the TTL, and judge what happened."""
    nemesis = FleetNemesis(plan, scene)
    scene.employ(*roles_of(scene, ttl_s=plan.ttl_s, seed=plan.seed))
    nemesis.rage()
    scene.await_boxes()
    scene.say("calm")
    time.sleep(plan.calm_s)
    if plan.served_s:
        scene.await_served(plan.served_s)
    scene.end_workers()
    scene.say_final()
    history = scene.history()
    counts = nemesis.counts
    counts["grants"] = len(history.workers.tenures)
    counts["grants_to_new_clients"] = sum(lease.who.startswith("new") for lease in history.workers.tenures)
    counts["events_in_journal"] = len(history.journal)
    counts["leaders"] = len(history.bases)
    counts["renewals"] = sum(line["what"] == "renewed" for line in history.workers.lines)
    counts["given_up"] = sum(line.get("why") in {"gave up", "lost"} for line in history.workers.lines)
    found = [*check(history.workers, is_fleet=True), *check_fleet(history)]
    broken = take_overs(history, nemesis.leader_broken_at)
    return Report(counts, found, broken, history)
