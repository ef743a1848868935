"""What a fleet must stand: outages in which no lease ends, and a crowd of old and new clients on all its GPUs."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tests.e2e.history_check import Violation, check
from tests.e2e.run_history import RunHistory, read_history
from tests.e2e.worker import Orders, now

from .client_worker import ClientOrders
from .fleet import GPUS, until
from .journal_check import check_fleet
from .scene import Scene

# Of the holders that keep their GPUs through outages. They give up after two thirds of it without a renewal, so it is longer
# than it takes to start a box again.
TTL_S = 6.0
FOREVER_S = 3600.0

Outage = Callable[[Scene], None]


def employ_holders(scene: Scene, ttl_s: float = TTL_S) -> None:
    """A holder on each GPU of each box: old clients, on the box and elsewhere, and new ones. They hold on."""
    old = Orders("", 0, "", ttl_s=ttl_s, is_local=False, shortest_hold_s=FOREVER_S, longest_hold_s=FOREVER_S)
    new = ClientOrders("", (), "", ttl_s=ttl_s, shortest_hold_s=FOREVER_S, longest_hold_s=FOREVER_S)
    local = replace(old, is_local=True)
    # The new ones go where there is room, so the old ones come first.
    of_boxes = [(local if number == 0 else old, box) for number, box in enumerate(scene.boxes)]
    for roles in (of_boxes, [(new, None)] * (len(scene.boxes) * (GPUS - 1))):
        held = len(scene.workers) + len(roles)
        scene.employ(*roles)
        until(lambda held=held: len(read_history(scene.folder).tenures) == held, f"{held} GPUs are held")


def lost_by(scene: Scene, outage: Outage) -> list[str]:
    """Which holders lost their lease, or gave it up, by an outage and after it."""
    outage(scene)
    leader = scene.await_boxes()
    history = read_history(scene.folder)
    lost = [f"{line['who']} left its GPU: {line['why']}" for line in history.of_kind("left")]
    active = {lease["id"] for lease in (scene.pool(leader) or {"leases": ()})["leases"] if lease["state"] == "active"}
    return lost + [f"{lease} is not active" for lease in history.tenures if lease.id not in active]


def database_down(scene: Scene, down_s: float = 0.0) -> None:
    """For so long, and for longer than a TTL. A box that cannot lead is restarted meanwhile, and keeps its leases."""
    began = now()
    scene.database.kill()
    agent = scene.boxes[-1]
    agent.kill()
    agent.start()
    longer_s = max(role.ttl_s for role in scene.roles.values())
    until(lambda: _have_renewed_since(scene, began + longer_s), "all have renewed their leases after a TTL")
    time.sleep(max(began + down_s - now(), 0.0))
    scene.database.start()


def leaders_replaced(scene: Scene, how: signal.Signals = signal.SIGTERM, within_s: float = 0.0) -> None:
    """Three times, spread over so long. Each is started again."""
    for _ in range(3):
        began = now()
        leader = scene.await_leader()
        leader.send(how)
        scene.await_leader(but=[leader])
        assert leader.process is not None
        leader.process.wait()
        leader.launch()
        scene.await_boxes()
        time.sleep(max(began + within_s / 3 - now(), 0.0))


def boxes_restarted(scene: Scene) -> None:
    for box in scene.boxes:
        box.kill()
        box.start()
        scene.await_boxes()


def leader_away(scene: Scene, within_s: float = 0.0) -> None:
    """Kill a leader that nobody replaces, three times, spread over this long."""
    for _ in range(3):
        began = now()
        leader = scene.await_leader()
        leader.kill()
        time.sleep(within_s / 6)
        leader.start()
        scene.await_boxes()
        time.sleep(max(began + within_s / 3 - now(), 0.0))


def outages(scene: Scene, minute_s: float) -> dict[str, Outage]:
    """For a whole test, `minute_s` is a minute. Without it they are as short as they can be."""
    if not scene.has_database:
        return {"leader_away_three_times": partial(leader_away, within_s=minute_s), "boxes_restarted": boxes_restarted}
    how = signal.SIGKILL if minute_s else signal.SIGTERM
    found: dict[str, Outage] = {
        "database_down_and_box_restarted": partial(database_down, down_s=minute_s),
        "leader_replaced_three_times": partial(leaders_replaced, how=how, within_s=minute_s),
    }
    return {**found, "boxes_restarted": boxes_restarted} if minute_s else found


def crowd(scene: Scene, old: int, new: int, rounds: int) -> tuple[RunHistory, list[Violation]]:
    """So many processes of old clients on each box, and of new clients in all, each with so many turns."""
    each = Orders("", 0, "", ttl_s=30.0, longest_hold_s=0.02, rounds=rounds)
    client = ClientOrders("", (), "", ttl_s=30.0, longest_hold_s=0.02, rounds=rounds)
    scene.employ(*[(each, box) for box in scene.boxes for _ in range(old)], *[(client, None)] * new)
    scene.await_workers()
    scene.say_final()
    history = scene.history()
    found = [*check(history.workers, is_fleet=True), *check_fleet(history)]
    found += [Violation("lock", str(line)) for line in history.workers.of_kind("witness_busy")]
    return history.workers, found


def _have_renewed_since(scene: Scene, since: float) -> bool:
    lines = read_history(scene.folder).lines
    renewing = {line["who"] for line in lines if line["what"] == "renewed"}
    late = {line["who"] for line in lines if line["what"] == "renewed" and line["sent"] > since}
    return bool(renewing) and renewing == late
