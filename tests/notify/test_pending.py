"""The pending is bounded, keeps the order of each target, and lets no target hold up another."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.lease import EndReason
from gpu_worker_pool.notify import pending as bounds
from gpu_worker_pool.notify.notice import Notice, Occasion, ends, warns
from gpu_worker_pool.notify.pending import Delivery, PendingNotices
from gpu_worker_pool.notify.rule import Program, Rule, Webhook

NOTICE = Notice(Occasion.GRANTED, 0.0, "a", "ada", (GpuKey("gpu-1", "GPU-0"),))


def delivery(number: int, target: int = 0, at: float = 0.0) -> Delivery:
    rule = Rule(frozenset({Occasion.GRANTED}), Webhook(f"http://target-{target}/"))
    return Delivery(str(number), NOTICE, rule, at)


def fail(
    pending: PendingNotices, failed: Delivery, now: float, *, is_final: bool = False, after_s: float = 0.0
) -> bool:
    """Whether it was given up."""
    return pending.fail(failed, now, "it failed", is_final=is_final, jitter=0.0, after_s=after_s) is not None


def test_one_target_is_told_one_at_a_time_and_in_order() -> None:
    pending = PendingNotices()
    for number in range(3):
        pending.add(delivery(number))

    (first,) = pending.start(0.0)
    assert pending.start(0.0) == []
    assert not fail(pending, first, 1.0)
    assert pending.start(1.0) == [], "a later one does not overtake the one that waits for its next attempt"
    (again,) = pending.start(pending.next_at())
    assert (again.id, again.attempts) == ("0", 1)
    pending.succeed(again)

    assert [each.id for each in pending.start(2.0)] == ["1"]


def test_a_target_that_hangs_holds_up_no_other() -> None:
    pending = PendingNotices()
    pending.add(delivery(1, target=1))
    pending.start(0.0)
    pending.add(delivery(2, target=1))
    pending.add(delivery(3, target=2))

    assert [each.id for each in pending.start(0.0)] == ["3"]


@pytest.mark.parametrize(("jitter", "most"), [(0.0, 32), (0.999, 20)])
def test_a_target_that_fails_is_tried_again_for_an_hour_with_growing_pauses(jitter: float, most: int) -> None:
    pending = PendingNotices()
    pending.add(delivery(1))
    times: list[float] = []
    while len(pending):
        times.append(max(0.0, pending.next_at()))
        (under_way,) = pending.start(times[-1])
        pending.fail(under_way, times[-1], "it failed", is_final=False, jitter=jitter)

    assert (pending.dropped, pending.sent) == (1, 0)
    waits = [round(later - earlier, 6) for earlier, later in pairwise(times)]
    assert waits == sorted(waits)
    assert waits[0] <= 1.0
    assert waits[-1] <= bounds.BACKOFF.max_s
    assert bounds.MAX_AGE_S - bounds.BACKOFF.max_s <= times[-1] <= bounds.MAX_AGE_S
    assert len(times) == most


def test_a_program_is_not_run_again_when_it_fails() -> None:
    pending = PendingNotices()
    pending.add(Delivery("1", NOTICE, Rule(frozenset({Occasion.GRANTED}), Program(("/bin/page",))), 0.0))
    (under_way,) = pending.start(0.0)
    assert fail(pending, under_way, 1.0)


def test_what_would_fail_again_is_not_tried_again_and_what_a_target_asks_for_is_kept() -> None:
    pending = PendingNotices()
    pending.add(delivery(1))
    (under_way,) = pending.start(0.0)
    assert fail(pending, under_way, 0.0, is_final=True)

    pending.add(delivery(2))
    (under_way,) = pending.start(0.0)
    assert not fail(pending, under_way, 0.0, after_s=100.0)
    assert pending.next_at() == 100.0

    pending.start(100.0)
    assert fail(pending, delivery(2), 100.0, after_s=bounds.MAX_AGE_S), "not after its time"


def test_no_target_takes_the_places_of_the_others() -> None:
    pending = PendingNotices()
    dropped = [pending.add(delivery(number)) for number in range(bounds.MOST_FOR_ONE + 1)]
    assert [each is not None for each in dropped] == [False] * bounds.MOST_FOR_ONE + [True]
    assert pending.add(delivery(9999, target=1)) is None

    for number in range(bounds.MOST_WAITING):
        pending.add(delivery(10_000 + number, target=number))
    assert len(pending) == bounds.MOST_WAITING


@given(st.lists(st.tuples(st.sampled_from(["add", "succeed", "fail", "wait"]), st.integers(0, 3)), max_size=60))
def test_each_delivery_is_sent_dropped_or_waits_and_none_overtakes(steps: list[tuple[str, int]]) -> None:
    pending, now, number = PendingNotices(), 0.0, 0
    under_way: dict[int, Delivery] = {}
    finished: dict[int, list[int]] = defaultdict(list)
    for action, target in steps:
        if action == "add":
            number += 1
            assert pending.add(delivery(number, target, now)) is None
        elif action == "wait":
            now += 1.0
        elif target in under_way:
            ended = under_way.pop(target)
            if action == "succeed":
                pending.succeed(ended)
                finished[target].append(int(ended.id))
            elif fail(pending, ended, now):
                finished[target].append(int(ended.id))
        for started in pending.start(now):
            of = int(started.rule.target.url.rsplit("-", 1)[1].strip("/"))  # type: ignore[union-attr]
            assert of not in under_way
            under_way[of] = started
    assert pending.sent + pending.dropped + len(pending) == number
    assert all(ids == sorted(ids) for ids in finished.values())


@pytest.mark.parametrize(
    ("rule", "applies"),
    [
        ({"owner": "ada"}, True),
        ({"owner": "a*"}, True),
        ({"owner": "bob"}, False),
        ({"node": "gpu-*"}, True),
        ({"node": "gpu-2"}, False),
        ({"occasions": frozenset({Occasion.ENDED})}, False),
    ],
)
def test_a_rule_applies_to_occasions_owners_and_nodes(rule: dict[str, object], *, applies: bool) -> None:
    parts: dict[str, object] = {"occasions": frozenset(Occasion), "target": Program(("/bin/true",)), **rule}

    assert Rule(**parts).applies_to(NOTICE) is applies  # type: ignore[arg-type]


def test_which_ends_are_losses() -> None:
    both = (Occasion.LOST, Occasion.ENDED)
    assert ends(EndReason.RELEASED, None, was_granted=True) == (Occasion.ENDED,)
    assert ends(EndReason.RELEASED, "root", was_granted=True) == both
    assert ends(EndReason.EXPIRED, None, was_granted=True) == both
    assert ends(EndReason.CANCELLED, None, was_granted=False) == ()
    assert (warns(EndReason.TIME_LIMIT), warns(None)) == (Occasion.TIME_LIMIT, None)
