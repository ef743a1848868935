"""What is still to be sent: bounded in number and in time, so that no target can hold up or fill the server."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import inf

from gpu_worker_pool.host.backoff import Backoff

from .notice import Notice
from .rule import Rule, Target

MOST_WAITING = 1_000
# So many wait for one target: one that is down must not take the places of the others.
MOST_FOR_ONE = 250
MOST_AT_ONCE = 8
# Attempts end after this time. Their number is bounded by it, too: 32 with the shortest pauses.
MAX_AGE_S = 3600.0
BACKOFF = Backoff(first_s=1.0, max_s=300.0)


@dataclass(frozen=True, slots=True)
class Delivery:
    """A notice on its way to the target of a rule. `id` stays the same for all attempts."""

    id: str
    notice: Notice
    rule: Rule
    added_at: float
    attempts: int = 0
    next_at: float = -inf


@dataclass(frozen=True, slots=True)
class Dropped:
    """A delivery that is given up, and why."""

    delivery: Delivery
    why: str


class PendingNotices:
    """Deliveries to one target go one after another, in the order in which they were added; those to several targets go side
    by side. Times are seconds of one clock.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Delivery] = {}
        self._under_way: dict[Target, Delivery] = {}
        self._of_target: Counter[Target] = Counter()
        self.sent = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._under_way)

    def add(self, delivery: Delivery) -> Dropped | None:
        """Take a delivery in; Dropped if there is no room for it."""
        target = delivery.rule.target
        if len(self) >= MOST_WAITING:
            return self._drop(delivery, f"{MOST_WAITING} notices wait already")
        if self._of_target[target] >= MOST_FOR_ONE:
            return self._drop(delivery, f"{MOST_FOR_ONE} notices wait for this target already")
        self._of_target[target] += 1
        self._waiting[delivery.id] = delivery
        return None

    def start(self, now: float) -> list[Delivery]:
        """The deliveries to be attempted now; each of them is under way until `finish`."""
        found: list[Delivery] = []
        seen: set[Target] = set()
        for delivery in list(self._waiting.values()):
            target = delivery.rule.target
            if len(self._under_way) >= MOST_AT_ONCE:
                break
            # An earlier one to the same target goes first, also while it waits for its next attempt.
            if target in seen or target in self._under_way:
                continue
            seen.add(target)
            if delivery.next_at <= now:
                del self._waiting[delivery.id]
                self._under_way[target] = delivery
                found.append(delivery)
        return found

    def next_at(self) -> float:
        """When the next attempt is due; inf if none waits for its time."""
        firsts: dict[Target, float] = {}
        for delivery in self._waiting.values():
            firsts.setdefault(delivery.rule.target, delivery.next_at)
        return min((at for target, at in firsts.items() if target not in self._under_way), default=inf)

    def succeed(self, delivery: Delivery) -> None:
        self._finish(delivery)
        self.sent += 1

    def fail(
        self, delivery: Delivery, now: float, why: str, *, is_final: bool, jitter: float, after_s: float = 0.0
    ) -> Dropped | None:
        """Plan the next attempt, not before `after_s`; Dropped if there is none. `jitter` is a random number in [0, 1)."""
        next_at = now + max(BACKOFF.delay_s(delivery.attempts, jitter), after_s)
        if is_final or not delivery.rule.is_tried_again or next_at > delivery.added_at + MAX_AGE_S:
            self._finish(delivery)
            return self._drop(delivery, why)
        # It goes before those that came later.
        del self._under_way[delivery.rule.target]
        again = replace(delivery, attempts=delivery.attempts + 1, next_at=next_at)
        self._waiting = {again.id: again, **self._waiting}
        return None

    def _finish(self, delivery: Delivery) -> None:
        target = delivery.rule.target
        del self._under_way[target]
        self._of_target[target] -= 1
        if not self._of_target[target]:
            del self._of_target[target]

    def _drop(self, delivery: Delivery, why: str) -> Dropped:
        self.dropped += 1
        return Dropped(delivery, why)
