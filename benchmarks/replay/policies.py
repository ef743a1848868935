"""The policies that benchmarks/replay compares: other placements with our queue, and other queues with our placement."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from benchmarks.replay.fragmentation import Kind
from benchmarks.replay.placements import BestFit, LeastFragmentation, Proposals, Random


class Rule(Enum):
    """Which waiter is served next."""

    OURS = "the queue's rule of the core"
    UNRESERVED = "the same, and no waiter ever waits long enough for a reservation"
    STRICT = "no task asks the pool while an earlier one waits (see pool.py)"
    EASY = "EASY backfilling with exact time limits (see easy.py)"
    HOLDS = "every waiter holds what is free and what it could use (see earlier_rule.py)"


@dataclass(frozen=True)
class Policy:
    """A way to grant GPUs. With our rule it differs from ours in which GPUs it takes, else in which request is next. Without
    `proposals` the placement is ours.
    """

    name: str
    says: str
    proposals: Callable[[random.Random, tuple[Kind, ...]], Proposals] | None = None
    rule: Rule = Rule.OURS

    @property
    def is_placement(self) -> bool:
        return self.rule is Rule.OURS


OURS = Policy("ours", "the pool as it is")
POLICIES = (
    OURS,
    Policy("random", "any node that has enough, and there any GPU; our queue", lambda rng, _: Random(rng)),
    Policy(
        "best fit",
        "the node with the least free GPU capacity that is enough, and there the tightest GPU; our queue",
        lambda *_: BestFit(),
    ),
    Policy(
        "FGD",
        "the node where fragmentation grows least, with the work known in advance; our queue",
        lambda _, kinds: LeastFragmentation(kinds),
    ),
    Policy("no reservations", "each request that fits is served, in order; our placement", rule=Rule.UNRESERVED),
    Policy("strict FIFO", "no request overtakes a waiter; our placement", rule=Rule.STRICT),
    Policy(
        "EASY, exact limits",
        "the first waiter has a reservation, and others start if they do not delay it, with every run time known; our placement",
        rule=Rule.EASY,
    ),
    Policy(
        "the earlier rule",
        "every waiter holds what is free and what it could use, as the pool did before; our placement",
        rule=Rule.HOLDS,
    ),
)
BY_NAME = {policy.name: policy for policy in POLICIES}
