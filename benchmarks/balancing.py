"""Do the balancing strategies keep what they promise? Many simulated requests over boxes of unequal size.

This is the pure core in simulated time, without servers. Requests arrive at random. Each goes to the first box in the
balancer's order that has a free GPU, and holds it for a random time. A strategy's promise is written down here once more,
plainly: which boxes the next request may go to, and with which share. The choices are compared with the sum of these
shares by chi-square. So is a draw by lot with the same shares, which keeps any promise on average and not better. Many
such draws show how far off a draw may be. A chi-square table does not apply where the shares change from request to
request and most requests leave no choice.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.shared.results import Cell, Point, Results, parser
from gpu_worker_pool.client.endpoints.balancing import Balancer, EndpointView
from gpu_worker_pool.config import STRATEGIES

SIZES = (1, 2, 4, 8, 16, 32)
LOAD = 0.8
MEAN_HOLD_S = 600.0
LOT = "by lot"
FEW_TRIALS = 16
FIRST_LOT = 1_000
Shares = dict[str, float]


@dataclass(frozen=True)
class Effort:
    requests: int
    seeds: int
    lots: int


QUICK = Effort(requests=300, seeds=2, lots=50)
WHOLE = Effort(requests=6_000, seeds=5, lots=500)


def in_turn_shares(views: Sequence[EndpointView]) -> Shares:
    """Return the same share for each."""
    return {view.endpoint_id: 1 / len(views) for view in views}


def by_size_shares(views: Sequence[EndpointView]) -> Shares:
    """Return shares in proportion to the number of GPUs."""
    total = sum(view.total_gpus for view in views)
    return {view.endpoint_id: view.total_gpus / total for view in views}


def by_room_shares(views: Sequence[EndpointView]) -> Shares:
    """Return equal shares for the boxes with the largest share of free GPUs and, among those, the most free GPUs."""
    rooms = {view.endpoint_id: (view.available_gpus / view.total_gpus, view.available_gpus) for view in views}
    best = max(rooms.values())
    chosen = [endpoint_id for endpoint_id, room in rooms.items() if room == best]
    return dict.fromkeys(chosen, 1 / len(chosen))


PROMISES: dict[str, Callable[[Sequence[EndpointView]], Shares]] = {
    "availability": by_room_shares,
    "round_robin": in_turn_shares,
    "weighted": by_size_shares,
}


@dataclass
class Box:
    """An endpoint: its GPUs, and how long they were held in all."""

    id: str
    gpus: int
    held: int = 0
    held_s: float = 0.0
    away: tuple[float, float] = (0.0, 0.0)

    def view(self, now: float) -> EndpointView:
        is_there = not self.away[0] <= now < self.away[1]
        return EndpointView(self.id, is_there, self.gpus, self.gpus - self.held)


@dataclass
class Outcome:
    """First choices of the balancer, and of a draw by lot with the same shares, and what was promised."""

    chosen: Counter[str] = field(default_factory=Counter)
    drawn: Counter[str] = field(default_factory=Counter)
    promised: Counter[str] = field(default_factory=Counter)
    # How often each promise was made.
    shares: Counter[tuple[tuple[str, float], ...]] = field(default_factory=Counter)
    not_allowed: int = 0
    utilization_percent: dict[str, float] = field(default_factory=dict)
    found_none: int = 0
    # By how many requests a box was off at most, by the number of requests so far.
    furthest: dict[int, float] = field(default_factory=dict)
    furthest_by_lot: dict[int, float] = field(default_factory=dict)

    def chi_square(self, counts: Counter[str]) -> float:
        return sum((counts[box] - expected) ** 2 / expected for box, expected in self.promised.items())

    @property
    def with_a_choice(self) -> int:
        """The number of requests that could have gone to more than one box."""
        return sum(requests for shares, requests in self.shares.items() if len(shares) > 1)

    def chances(self, lots: int, seed: int, *counts: Counter[str]) -> list[float]:
        """Return for each of these counts the share of draws by lot, out of `lots`, that are as far off or further."""
        lot = random.Random(seed)
        drawn = [self.chi_square(self._draw(lot)) for _ in range(lots)]
        # Equal sums count as further off, although their last digits may differ.
        bounds = [self.chi_square(one) * (1 - 1e-9) for one in counts]
        return [sum(value >= bound for value in drawn) / lots for bound in bounds]

    def _draw(self, lot: random.Random) -> Counter[str]:
        """Draw each request by lot; those with the same shares all at once."""
        counts: Counter[str] = Counter()
        for shares, requests in self.shares.items():
            left, total = requests, 1.0
            for box, share in shares[:-1]:
                number = binomial(lot, left, min(share / total, 1.0))
                counts[box] += number
                left, total = left - number, total - share
            counts[shares[-1][0]] += left
        return counts

    def off_by(self, counts: Counter[str]) -> float:
        return max(abs(counts[box] - expected) for box, expected in self.promised.items())


def simulate(name: str, requests: int, seed: int, *, is_one_away: bool) -> Outcome:
    rng = random.Random(seed)
    lot = random.Random(seed + 1)
    balancer = Balancer(name)
    # When one box is away, the others carry its load too.
    pause_s = MEAN_HOLD_S / (LOAD * sum(SIZES))
    boxes = {f"box{gpus:02}": Box(f"box{gpus:02}", gpus) for gpus in SIZES}
    if is_one_away:
        boxes["box08"].away = (requests * pause_s / 3, requests * pause_s * 2 / 3)
    outcome = Outcome()
    marks = {round(requests ** (step / 12)) for step in range(1, 13)}
    leaving: list[tuple[float, str]] = []
    now = furthest = furthest_by_lot = 0.0
    for number in range(1, requests + 1):
        now += rng.expovariate(1 / pause_s)
        while leaving and leaving[0][0] <= now:
            boxes[heapq.heappop(leaving)[1]].held -= 1
        order = choose(balancer, [box.view(now) for box in boxes.values()], lot, outcome)
        taken = next((boxes[box_id] for box_id in order if boxes[box_id].held < boxes[box_id].gpus), None)
        if taken is None:
            outcome.found_none += 1
        else:
            hold_s = rng.expovariate(1 / MEAN_HOLD_S)
            taken.held += 1
            taken.held_s += hold_s
            heapq.heappush(leaving, (now + hold_s, taken.id))
        furthest = max(furthest, outcome.off_by(outcome.chosen))
        furthest_by_lot = max(furthest_by_lot, outcome.off_by(outcome.drawn))
        if number in marks:
            outcome.furthest[number], outcome.furthest_by_lot[number] = furthest, furthest_by_lot
    for leaves_at, box_id in leaving:
        boxes[box_id].held_s -= leaves_at - now
    outcome.utilization_percent = {box.id: 100 * box.held_s / (box.gpus * now) for box in boxes.values()}
    return outcome


def choose(balancer: Balancer, views: list[EndpointView], lot: random.Random, outcome: Outcome) -> list[str]:
    """Return the order for one request, and note it in the outcome with the promise and a draw by lot."""
    promised = PROMISES[balancer.name]([view for view in views if view.is_healthy])
    outcome.promised.update(promised)
    outcome.shares[tuple(promised.items())] += 1
    outcome.drawn[lot.choices(list(promised), list(promised.values()))[0]] += 1
    order = balancer.order(views)
    outcome.chosen[order[0]] += 1
    outcome.not_allowed += order[0] not in promised
    return order


def binomial(lot: random.Random, trials: int, share: float) -> int:
    """Draw how many of the trials succeed. The middle trial is drawn first, so that few single trials are needed."""
    successes = 0
    while trials > FEW_TRIALS and 0.0 < share < 1.0:
        middle = trials // 2 + 1
        # Each trial is a number from 0 to 1 that succeeds below `share`; this is the one of that rank.
        value = lot.betavariate(middle, trials + 1 - middle)
        if value < share:
            successes, trials, share = successes + middle, trials - middle, (share - value) / (1 - value)
        else:
            trials, share = middle - 1, share / value
    return successes + sum(lot.random() < share for _ in range(trials))


def chance(chi_square: float, freedom: int) -> float:
    """Return how often a draw by lot is off by more than that (Wilson and Hilferty's approximation)."""
    scale = 2 / (9 * freedom)
    return 1 - statistics.NormalDist().cdf(((chi_square / freedom) ** (1 / 3) - (1 - scale)) / scale**0.5)


def report(results: Results, effort: Effort, outcomes: dict[str, list[Outcome]], fleet: str) -> None:
    rows: list[list[Cell]] = []
    for name, found in outcomes.items():
        chances = [one.chances(effort.lots, FIRST_LOT + seed, one.chosen, one.drawn) for seed, one in enumerate(found)]
        # The table applies only where each request has the same shares.
        has_table = all(len(one.shares) == 1 for one in found)
        for is_lot, who in enumerate((name, f"{name}, {LOT}")):
            sums = [one.chi_square(one.drawn if is_lot else one.chosen) for one in found]
            p = [both[is_lot] for both in chances]
            by_table = statistics.median(chance(one, len(found[0].promised) - 1) for one in sums) if has_table else None
            furthest = max(max((one.furthest_by_lot if is_lot else one.furthest).values()) for one in found)
            rows.append(
                [
                    who,
                    f"{statistics.fmean(one.with_a_choice for one in found):.0f}",
                    0 if is_lot else sum(one.not_allowed for one in found),
                    f"{statistics.median(sums):.3f}",
                    f"{min(sums):.3f} to {max(sums):.3f}",
                    f"{statistics.median(p):.3f}",
                    f"{min(p):.3f} to {max(p):.3f}",
                    f"{by_table:.3f}" if by_table is not None else None,
                    f"{furthest:.1f}",
                ]
            )
    results.table(
        f"First choices compared with the promise, {fleet}: {effort.requests:,} requests, {effort.seeds} seeds",
        [
            "", "requests with a choice, mean", "choices not allowed", "sum of squares, median", "seeds",
            "p, median", "seeds", "p by chi-square's table", "requests off, most of any box",
        ],
        rows,
        note=f"p: the share of {effort.lots:,} draws by lot, with the promised shares, that are as far off or further. Near 1, "
        "the choices are closer to the promise than chance; under 0.05, the promise is not kept. The chi-square table applies "
        "only where the promise is the same for each request.",
    )  # fmt: skip
    boxes = [f"box{gpus:02}" for gpus in SIZES]
    used: list[list[Cell]] = []
    for name, found in outcomes.items():
        percents = [statistics.fmean(outcome.utilization_percent[box] for outcome in found) for box in boxes]
        none = statistics.fmean(100 * outcome.found_none / effort.requests for outcome in found)
        used.append([name, *(f"{percent:.0f} %" for percent in percents), f"{none:.1f} %"])
    results.table(
        f"Share of the time that a box's GPUs are held, {fleet}; load {LOAD:.0%} of all GPUs",
        ["", *(f"{gpus} GPU{'s' if gpus > 1 else ''}" for gpus in SIZES), "requests that found no GPU free"],
        used,
    )


def plots(results: Results, outcomes: dict[str, list[Outcome]]) -> None:
    total = sum(SIZES)
    results.plot(
        "shares",
        "First choices by box, as shares of all requests",
        kind="bar",
        x="GPUs of the box",
        y="%",
        series={
            "share of all GPUs": [(str(gpus), 100 * gpus / total) for gpus in SIZES],
            **{
                name: [
                    (
                        str(gpus),
                        statistics.fmean(100 * one.chosen[f"box{gpus:02}"] / one.chosen.total() for one in found),
                    )
                    for gpus in SIZES
                ]
                for name, found in outcomes.items()
            },
        },
    )
    series: dict[str, list[Point]] = {}
    for name, found in outcomes.items():
        numbers = sorted(found[0].furthest)
        series[name] = [(number, max(one.furthest[number] for one in found)) for number in numbers]
        series[f"{name}, {LOT}"] = [(number, max(one.furthest_by_lot[number] for one in found)) for number in numbers]
    results.plot(
        "distance",
        "Largest deviation of a box from its promise, by number of requests",
        kind="line",
        x="requests",
        y="requests off",
        log_x=True,
        log_y=True,
        series=series,
        note="The worst of all seeds.",
    )


def main() -> None:
    options = parser(__doc__).parse_args()
    effort = QUICK if options.quick else WHOLE
    results = Results("balancing", "Whether the balancing strategies keep what they promise on unequal fleets.")
    for is_one_away, fleet in ((False, "all boxes present"), (True, "the box of 8 away for a third of the time")):
        outcomes = {
            name: [simulate(name, effort.requests, seed, is_one_away=is_one_away) for seed in range(effort.seeds)]
            for name in STRATEGIES
        }
        report(results, effort, outcomes, fleet)
        if not is_one_away:
            plots(results, outcomes)
    results.finish(options)


if __name__ == "__main__":
    main()
