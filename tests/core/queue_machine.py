"""Random histories with owners, quotas, bookings, preemptible leases and idle holders.

It is a machine of its own: with all of these in every history, the plain rules would be met too seldom.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from tests.core.pool_machine import NODES, PoolMachine, gpu_numbers, sizes, wishes

PLAIN = {
    "gpus": 1,
    "memory_mb": None,
    "model": None,
    "memory_threshold_percent": None,
    "utilization_threshold_percent": None,
    "among": None,
    "nodes": 1,
    "node": None,
}
on_nodes = st.builds(
    lambda gpus, node: {**PLAIN, "gpus": gpus, "node": node}, st.integers(1, 2), st.sampled_from(NODES)
)
owners = st.sampled_from(["ada", "bob", None])


QUEUE_SETTINGS = st.fixed_dictionaries(
    {
        "max_sharers": st.just(64),
        "awaits_reading_after_release": st.sampled_from([False, False, True]),
        "outsiders": st.just("by_request"),
        "remembered_ended_leases": st.just(100),
        "reserve_after_s": st.sampled_from([0.0, 0.0, 10.0]),
        "preempt_grace_s": st.sampled_from([10.0, 60.0]),
        "default_time_limit_s": st.sampled_from([None, None, None, 90.0]),
        "max_time_limit_s": st.sampled_from([None, None, None, 300.0]),
        "fair_share": st.sampled_from([False, False, True]),
        "idle_after_s": st.sampled_from([10.0, 1800.0]),
        "idle_reclaim": st.booleans(),
        "take_up_s": st.sampled_from([None, None, 5.0]),
    }
)


class QueueMachine(PoolMachine):
    @initialize(settings=QUEUE_SETTINGS, size=sizes)
    def start(self, settings: dict[str, Any], size: int) -> None:
        super().start(settings, size)

    @rule(
        target=PoolMachine.leases,
        wishes=st.one_of(
            st.just(PLAIN), st.just({**PLAIN, "gpus": 2}), st.just({**PLAIN, "nodes": 2}), on_nodes, wishes
        ),
        priority=st.sampled_from([0, 0, 0, 1]),
        time_limit_s=st.sampled_from([None, None, 10.0, 40.0, 200.0, 500.0]),
        preemptible=st.booleans(),
        owner=owners,
    )
    def request_on_terms(
        self, wishes: dict[str, Any], priority: int, time_limit_s: float | None, preemptible: bool, owner: str | None
    ) -> Any:
        terms = {"time_limit_s": time_limit_s, "preemptible": preemptible}
        return self.ask(wishes, priority, 1000.0, True, None, terms, owner)

    @rule(
        owner=st.sampled_from(["ada", "bob", "*"]),
        gpus=st.sampled_from([None, 0, 1, 2]),
        weight=st.sampled_from([1.0, 3.0]),
        max_time_limit_s=st.sampled_from([None, None, None, 150.0]),
        max_priority=st.sampled_from([None, None, 0]),
        is_removed=st.booleans(),
    )
    def set_quota(self, owner: str, is_removed: bool, **limits: Any) -> None:
        quota = None if is_removed else self.core.configured.Quota(**limits)
        self.pool.do(self.core.commands.Configure("quotas", (owner,), quota), self.now)

    @rule(
        name=st.sampled_from(["vision", "speech"]),
        members=st.sampled_from([(), ("ada",), ("bob",), ("ada", "cyd")]),
        quota=st.sampled_from([None, None, 0, 1, 2]),
        first_right=st.sets(st.integers(0, 2), max_size=2),
        is_removed=st.sampled_from([False, False, True]),
    )
    def set_group(
        self, name: str, members: tuple[str, ...], quota: int | None, first_right: set[int], is_removed: bool
    ) -> None:
        keys = tuple(self.key(number) for number in sorted(first_right) if number < self.size)
        group = None if is_removed else self.core.configured.Group(members, members, quota, keys)
        self.pool.do(self.core.commands.Configure("groups", (name,), group), self.now)

    @rule(
        number=st.integers(1, 2),
        gpu=st.none() | gpu_numbers,
        begins=st.sampled_from([-5.0, 0.0, 20.0, 100.0]),
        lasts_s=st.sampled_from([None, 10.0, 60.0]),
        owner=owners,
        gpus=st.integers(1, 2),
    )
    def book(
        self, number: int, gpu: int | None, begins: float, lasts_s: float | None, owner: str | None, gpus: int
    ) -> None:
        starts_at = self.now + self.wall + begins
        ends_at = None if lasts_s is None else starts_at + lasts_s
        keys = () if gpu is None else (self.key(gpu),)
        booking = self.core.configured.Booking(f"booking{number}", keys, starts_at, ends_at, owner, "a course")
        wanted = self.core.request.Wishes(gpus=gpus)
        self.pool.do(self.core.commands.BookGpus(booking, wanted), self.now)

    @rule(number=st.integers(1, 2))
    def cancel_booking(self, number: int) -> None:
        self.pool.do(self.core.commands.Configure("bookings", (f"booking{number}",)), self.now)

    @rule(seconds=st.sampled_from([30.0, 120.0]))
    def run_on(self, seconds: float) -> None:
        """Let time pass as a driver does: it wakes up whenever something is due, and looks at the GPUs now and then."""
        until = self.now + seconds
        while self.now < until:
            due = max(self.pool.state.next_due_at(), self.now)
            self.now = min(due, self.now + 10.0, until)
            self.pool.do(self.core.commands.Tick(), self.now)
            self.see_all_idle()
