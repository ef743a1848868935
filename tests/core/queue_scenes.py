"""Scenes for the rules of the queue: reservations, time limits, preemption, quotas, bookings, idle holders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.core.harness import Core
from tests.core.scenes import Scene

LATER_S = 1e9


class QueueScene(Scene):
    """Readings do not grow stale, a released GPU is free at once, and the first waiter reserves at once."""

    def __init__(self, core: Core, gpus: int = 1, **settings: Any) -> None:
        usual = {"stale_after_s": LATER_S, "awaits_reading_after_release": False, "reserve_after_s": 0.0}
        super().__init__(core, gpus, **{**usual, **settings})

    def want(self, number: int, now: float, *, owner: str | None = None, gpus: int = 1, **terms: Any) -> None:
        """A request of a remote holder, which outlives a reboot of the box."""
        request = self.core.request
        wished = {name: terms.pop(name) for name in ("among", "memory_mb", "nodes", "node") if name in terms}
        wishes = request.Wishes(gpus=gpus, **wished)
        asked = request.Request(wishes, request.Holder(owner=owner), ttl_s=100_000.0, **terms)
        self.pool.do(self.core.commands.RequestLease(f"lease{number}", asked), now)

    def tick(self, *times: float) -> None:
        for now in times:
            self.pool.do(self.core.commands.Tick(), now)

    def give(self, owner: str, **quota: Any) -> None:
        self.pool.do(self.core.commands.Configure("quotas", (owner,), self.core.configured.Quota(**quota)), 2.0)

    def form(
        self, *members: str, quota: int | None = None, first_right: tuple[int, ...] = (0,), now: float = 2.0
    ) -> None:
        keys = tuple(self.keys[index] for index in first_right)
        group = self.core.configured.Group(members, members, quota, keys)
        self.pool.do(self.core.commands.Configure("groups", ("vision",), group), now)

    def book(self, starts: float, ends: float | None, owner: str | None = None) -> None:
        booking = self.core.configured.Booking("course", (self.keys[0],), starts, ends, owner, "a course")
        self.pool.do(self.core.commands.BookGpus(booking, self.core.request.Wishes()), 2.0)

    def end(self) -> None:
        self.pool.check_replay()


def wait_for_two(core: Core, **settings: Any) -> QueueScene:
    """One of two GPUs is held until 103, and the first waiter needs both."""
    scene = QueueScene(core, gpus=2, **settings)
    scene.want(1, 3.0, time_limit_s=100.0)
    scene.want(2, 4.0, gpus=2)
    return scene


def have_not_waited_long(core: Core) -> None:
    scene = wait_for_two(core, reserve_after_s=600.0)
    scene.want(3, 5.0)
    scene.release(3, 6.0)


def wait_behind_a_reservation(core: Core) -> None:
    scene = wait_for_two(core)
    scene.want(3, 5.0)
    scene.want(4, 6.0, time_limit_s=200.0)
    scene.want(5, 7.0, time_limit_s=50.0)


def leave_the_queue_with_a_reservation(core: Core) -> None:
    scene = wait_for_two(core)
    scene.want(3, 5.0)
    scene.release(2, 6.0)


def renumber_a_gpu_that_is_taken(core: Core) -> None:
    scene = QueueScene(core, gpus=2)
    scene.want(1, 2.0, among=("1",), time_limit_s=100.0)
    scene.want(2, 3.0, gpus=2, among=("0", "1"))
    scene.want(3, 4.0, among=("GPU-a0",))
    gpu = core.gpu
    reading = gpu.Reading(gpu.Gpu(scene.keys[1], 5, "NVIDIA A100"), 5.0, 80_000.0, 0.0, 0.0, processes=())
    scene.pool.do(core.commands.Observe((reading,)), 5.0)


def wait_for_two_behind_one_that_waits_for_two(core: Core) -> None:
    scene = wait_for_two(core)
    scene.want(3, 5.0, gpus=2, time_limit_s=10.0)
    scene.tick(6.0)
    scene.want(4, 7.0, time_limit_s=20.0)
    scene.release(4, 8.0)  # so the whole queue is looked at


def wait_behind_one_of_a_higher_priority(core: Core) -> None:
    scene = wait_for_two(core, reserve_after_s=100.0)
    scene.want(3, 90.0, gpus=2, priority=1)
    scene.want(4, 95.0, priority=2, time_limit_s=300.0)
    scene.tick(104.5)
    scene.want(5, 105.0)


def find_another_node_free_sooner(core: Core) -> None:
    gpu, scene = core.gpu, QueueScene(core, gpus=2)
    other = [gpu.GpuKey("other", f"GPU-b{index}") for index in range(2)]
    readings = [gpu.Reading(gpu.Gpu(k, i, "A100"), 2.0, 80_000.0, 0.0, 0.0, processes=()) for i, k in enumerate(other)]
    scene.pool.do(core.commands.AnnounceNode("other", "boot"), 2.0)
    scene.pool.do(core.commands.Observe(tuple(readings)), 2.0)
    for number, (name, limit_s) in enumerate(
        (("GPU-a0", 100.0), ("GPU-a1", 100.0), ("GPU-b0", 90.0), ("GPU-b1", 150.0))
    ):
        scene.want(number, 3.0, among=(name,), time_limit_s=limit_s)
    scene.want(4, 4.0, gpus=2)
    scene.release(3, 5.0)


def predict_far_ahead(core: Core) -> None:
    scene = QueueScene(core)
    scene.want(1, 3.0)
    scene.release(1, 20_000.0)
    scene.want(2, 20_001.0)
    scene.want(3, 20_002.0)


def drain_before_the_first_waiter(core: Core) -> None:
    scene = wait_for_two(core, awaits_reading_after_release=True)
    scene.tick(53.0)
    scene.want(3, 100.0, time_limit_s=20.0)
    scene.tick(103.0)
    scene.see(104.0)


def lose_sight_of_the_gpus(core: Core) -> None:
    scene = wait_for_two(core, stale_after_s=15.0, drain_limit_s=60.0)
    scene.want(3, 5.0)
    scene.tick(17.0, 40.0)
    scene.see(41.0)
    scene.see(42.0, utilization=None)
    scene.tick(60.0, 102.0, 103.0)


def wait_for_a_booked_gpu(core: Core) -> None:
    scene = QueueScene(core, gpus=2)
    scene.book(50.0, 100.0, "ada")
    scene.want(2, 60.0, gpus=2, owner="bob")
    scene.want(3, 61.0, owner="ada")


def share_beyond_the_quota(core: Core) -> None:
    scene = QueueScene(core, gpus=2)
    scene.give("ada", gpus=1)
    gpu, request = core.gpu, core.request
    sizes = zip(scene.keys, (80_000.0, 20_000.0), strict=True)
    readings = [gpu.Reading(gpu.Gpu(k, i, "A100"), 2.0, mb, 0.0, 0.0, processes=()) for i, (k, mb) in enumerate(sizes)]
    scene.pool.do(core.commands.Observe(tuple(readings)), 2.0)
    for number, memory_mb in enumerate((50_000.0, 15_000.0)):
        asked = request.Request(request.Wishes(memory_mb=memory_mb), request.Holder(owner="ada"), ttl_s=100_000.0)
        scene.pool.do(core.commands.RequestLease(f"lease{number}", asked), 3.0)


def reach_the_time_limit(core: Core) -> None:
    scene = QueueScene(core)
    scene.want(1, 3.0, time_limit_s=100.0)
    scene.tick(53.0)
    scene.end()
    scene.tick(103.0, 104.0)


def come_back_after_the_time_limit(core: Core) -> None:
    scene = QueueScene(core)
    scene.want(1, 3.0, time_limit_s=100.0)
    scene.tick(500.0)


def need_one_of_three(core: Core) -> None:
    scene = QueueScene(core, gpus=3)
    for number in range(3):
        scene.want(number, 3.0 + number, preemptible=True)
    scene.want(3, 10.0)
    scene.want(4, 11.0)
    scene.tick(12.0, 70.0, 71.0)


def need_what_a_later_waiter_has_reserved(core: Core) -> None:
    """It is being freed, so the preemptible lease on another GPU need not make room."""
    scene = QueueScene(core, gpus=2, fair_share=True)
    scene.want(1, 3.0, time_limit_s=100.0)
    scene.want(2, 4.0, preemptible=True)
    scene.want(3, 5.0, preemptible=True)
    scene.tick(53.0)  # the first lease is warned of its time limit
    scene.want(4, 54.0)


def need_what_an_owner_that_used_more_has_reserved(core: Core) -> None:
    """The same among requests of one kind: the order may change while nothing happens, and the claim stays."""
    scene = QueueScene(core, gpus=3, fair_share=True)
    scene.want(1, 3.0, owner="ada", among=("0",), time_limit_s=100.0)
    scene.want(2, 3.0, among=("1",), time_limit_s=1000.0)
    scene.want(3, 4.0, preemptible=True)
    scene.want(4, 5.0, owner="ada", gpus=2, among=("0", "1"))
    scene.tick(53.0)
    scene.want(5, 54.0, owner="bob")


def ask_for_what_another_preemptible_lease_has(core: Core) -> None:
    scene = QueueScene(core)
    scene.want(1, 3.0, preemptible=True)
    scene.want(2, 4.0, preemptible=True, priority=1)


def ask_preemptibly_before_another(core: Core) -> None:
    scene = QueueScene(core)
    scene.want(1, 3.0)
    scene.want(2, 4.0, preemptible=True)
    scene.want(3, 5.0)
    scene.release(1, 6.0)


def ask_beyond_the_quota(core: Core) -> None:
    scene = QueueScene(core, gpus=2)
    scene.give("ada", gpus=1)
    for number in (1, 2):
        scene.want(number, 3.0, owner="ada", time_limit_s=100.0)


def reclaim_beyond_the_quota(core: Core) -> None:
    scene = QueueScene(core, gpus=2, awaits_reading_after_release=True)
    request = core.request
    holder = request.Holder(owner="ada", process=core.gpu.ProcessId(1, 1.0))
    commands = core.commands
    scene.pool.do(commands.RequestLease("lease1", request.Request(request.Wishes(among=("0",)), holder)), 2.0)
    scene.see(3.0, scene.process(1))
    scene.give("ada", gpus=1)
    scene.pool.do(commands.Release("lease1", is_holder=True), 4.0)
    scene.want(2, 5.0, owner="ada", among=("1",))
    scene.pool.do(commands.RequestLease("lease3", request.Request(request.Wishes(), holder)), 6.0)


def share_fairly(core: Core) -> None:
    scene = QueueScene(core, gpus=2, fair_share=True)
    scene.give("ada", weight=4.0)
    scene.want(1, 3.0, owner="ada")
    scene.want(2, 23.0, owner="bob")
    scene.want(3, 33.0, owner="bob")
    scene.want(4, 34.0, owner="ada")
    scene.want(5, 35.0, owner="bob")
    scene.end()
    scene.release(2, 36.0)


def share_fairly_without_weights(core: Core) -> None:
    scene = QueueScene(core, fair_share=True)
    scene.want(1, 3.0, owner="ada")
    scene.want(2, 4.0, owner="ada")
    scene.want(3, 5.0, owner="bob")
    scene.release(1, 6.0)


def ask_before_a_booking(core: Core) -> None:
    scene = QueueScene(core)
    scene.book(100.0, 200.0)
    scene.want(1, 3.0)
    scene.want(2, 4.0, time_limit_s=300.0)
    scene.want(3, 5.0, time_limit_s=50.0)


def wait_for_the_end_of_a_booking(core: Core) -> None:
    scene = QueueScene(core)
    scene.book(50.0, 100.0)
    scene.want(1, 3.0)
    scene.tick(99.0, 100.0)
    scene.end()


def make_room_for_a_booking(core: Core) -> None:
    scene = QueueScene(core)
    scene.book(100.0, 200.0, "ada")
    scene.want(1, 3.0, preemptible=True)
    scene.tick(39.0, 40.0, 100.0, 101.0)


def wait_for_two_before_a_booking(core: Core, starts: float) -> QueueScene:
    """The lease on one of two GPUs ends at 103, and the first waiter needs both for 50 seconds."""
    scene = QueueScene(core, gpus=2, awaits_reading_after_release=True, drain_limit_s=20.0)
    scene.book(starts, 300.0)
    scene.want(1, 3.0, time_limit_s=100.0)
    scene.want(2, 4.0, gpus=2, time_limit_s=50.0)
    return scene


def just_fit_before_a_booking(core: Core) -> None:
    wait_for_two_before_a_booking(core, 103.0 + 50.0)


def drain_before_a_booking(core: Core) -> None:
    scene = wait_for_two_before_a_booking(core, 103.0 + 20.0 + 50.0)
    scene.tick(53.0, 103.0)
    scene.pool.do(
        core.commands.Configure("quotas", ("ada",), core.configured.Quota()), 105.0
    )  # so the whole queue is looked at
    scene.see(106.0)


def hold_memory_and_compute_nothing(core: Core) -> None:
    scene = QueueScene(core, idle_after_s=10.0, idle_reclaim=True)
    scene.want(1, 3.0)
    for at in (5.0, 10.0, 14.0):
        scene.see(at, used_mb=50_000.0)


def hold_where_the_load_is_unknown(core: Core) -> None:
    scene = QueueScene(core, idle_after_s=10.0, idle_reclaim=True)
    scene.want(1, 3.0)
    for at in (10.0, 12.0):
        scene.see(at, utilization=None)
    scene.see(14.0)


def compute_again_after_a_warning(core: Core) -> None:
    scene = QueueScene(core, idle_after_s=10.0, idle_reclaim=True)
    scene.want(1, 3.0)
    scene.see(14.0)
    scene.see(15.0, utilization=50.0)


def be_spared_while_idle(core: Core) -> None:
    """The soak found this one. A preemptible lease makes room for a waiter, until another lease is to end as idle: the waiter
    will get the GPU of that one. The spared lease is idle, too, and is warned of that with the next reading.
    """
    scene = QueueScene(core, gpus=2, idle_after_s=10.0, idle_reclaim=True)
    scene.want(1, 3.0, memory_mb=8_000.0)
    scene.want(2, 4.0, preemptible=True)
    scene.want(3, 5.0)
    scene.see(14.0)
    assert [scene.pool.state.active(f"lease{number}").ending is None for number in (1, 2)] == [False, True]
    scene.see(15.0)
    assert scene.pool.state.active("lease2").ending.reason == "idle"


def compute_again_in_the_way_of_a_booking(core: Core) -> None:
    """The soak found this one: the lease was to end as idle when the booking began."""
    scene = QueueScene(core, idle_after_s=10.0, idle_reclaim=True)
    scene.want(1, 1.0, preemptible=True)
    scene.see(12.0)
    booking = core.configured.Booking("course", (scene.keys[0],), 8.0, None, "bob", "a course")
    scene.pool.do(core.commands.BookGpus(booking, core.request.Wishes()), 13.0)
    scene.see(14.0, utilization=50.0)
    scene.tick(14.1)
    assert scene.pool.state.active("lease1").ending.reason == "preempted"


def release_before_a_booking(core: Core) -> None:
    """A lease that lasted for a second tells that another like it has ended when the booking begins."""
    scene = QueueScene(core, gpus=2, awaits_reading_after_release=True)
    scene.book(100.0, None, owner="ada")
    scene.want(1, 3.0)
    scene.want(2, 3.0)
    scene.release(1, 4.0)


def wait_for_what_a_group_has_first(core: Core, *, preemptible: bool = False) -> None:
    """Bob asks before a member of the group does, and both wait. Then the GPU is free."""
    scene = QueueScene(core, reserve_after_s=LATER_S)
    scene.form("ada")
    scene.want(1, 3.0, owner="cyd")
    scene.want(2, 4.0, owner="bob", preemptible=preemptible)
    scene.want(3, 5.0, owner="ada", preemptible=preemptible)
    scene.release(1, 6.0)
    assert scene.pool.state.active("lease3")
    scene.end()


def wait_preemptibly_for_what_a_group_has_first(core: Core) -> None:
    wait_for_what_a_group_has_first(core, preemptible=True)


def use_preemptibly_what_a_group_waits_for(core: Core) -> None:
    """One of two GPUs is held, and the member needs both: meanwhile another may have the free one preemptibly, and no longer
    than until the other is free, too.
    """
    scene = QueueScene(core, gpus=2, reserve_after_s=LATER_S)
    scene.form("ada", first_right=(0, 1))
    scene.want(1, 3.0, owner="cyd")
    scene.want(2, 4.0, owner="ada", gpus=2)
    scene.want(3, 5.0, owner="bob", preemptible=True)
    assert scene.pool.state.active("lease3")
    scene.end()


def use_what_no_member_waits_for(core: Core) -> None:
    scene = QueueScene(core, gpus=2, reserve_after_s=LATER_S)
    scene.form("ada")
    scene.want(1, 3.0, owner="ada", among=("1",))
    scene.want(2, 4.0, owner="ada", among=("1",))
    scene.want(3, 5.0, owner="bob")
    assert scene.pool.state.active("lease3")
    scene.end()


def wait_where_a_group_may_have_no_more(core: Core) -> None:
    scene = QueueScene(core, gpus=3, reserve_after_s=LATER_S)
    scene.form("ada", "dan", quota=1, first_right=(0, 1))
    scene.want(1, 3.0, owner="ada")
    scene.want(2, 4.0, owner="dan")
    # What the group may not have is nobody's first right.
    scene.want(3, 5.0, owner="bob", gpus=2)
    assert scene.pool.state.queued("lease2")
    assert scene.pool.state.active("lease3")
    scene.end()


def reserve_nothing_that_a_group_waits_for(core: Core) -> None:
    scene = QueueScene(core, gpus=2)
    scene.form("ada")
    scene.want(1, 3.0, owner="cyd", gpus=2, time_limit_s=100.0)
    scene.want(2, 4.0, owner="bob")
    scene.want(3, 5.0, owner="ada", among=("0",))
    reservation = scene.pool.state.reservation
    assert reservation is not None
    assert reservation.gpus == (scene.keys[1],)
    scene.end()


def claim_what_another_group_has_first(core: Core) -> None:
    scene = QueueScene(core)
    scene.form("ada")
    group = core.configured.Group(("bob",), ("bob",), None, (scene.keys[0],))
    scene.pool.do(core.commands.Configure("groups", ("speech",), group), 3.0)
    scene.form(now=4.0)
    assert list(scene.pool.state.groups) == ["vision"]
    assert scene.pool.state.groups["vision"].members == ("ada",)
    scene.end()


QUEUE_SCENES: dict[str, Callable[[Core], None]] = {
    "a group goes first where it has the right": wait_for_what_a_group_has_first,
    "a preemptible member goes before a preemptible request of others": wait_preemptibly_for_what_a_group_has_first,
    "others use preemptibly what a group waits for": use_preemptibly_what_a_group_waits_for,
    "others use what no member waits for": use_what_no_member_waits_for,
    "a group has at most its quota together": wait_where_a_group_may_have_no_more,
    "who may have no more keeps nothing from others": wait_where_a_group_may_have_no_more,
    "nothing is reserved that a group waits for": reserve_nothing_that_a_group_waits_for,
    "no two groups have first right on one GPU": claim_what_another_group_has_first,
    "a group has members": claim_what_another_group_has_first,
    "the queue is looked at again when GPUs have other indices": renumber_a_gpu_that_is_taken,
    "the queue is served again when a waiter with a reservation leaves": leave_the_queue_with_a_reservation,
    "the queue is served again when leases are predicted to last less long": release_before_a_booking,
    "nothing is reserved before a waiter has waited long": have_not_waited_long,
    "a prediction admits no request to what is reserved": wait_behind_a_reservation,
    "what ends after the date is not admitted": wait_behind_a_reservation,
    "what is reserved is kept from later waiters": wait_behind_a_reservation,
    "the first that cannot be served has the reservation": wait_for_two_behind_one_that_waits_for_two,
    "a waiter of a lower priority may have waited for longer": wait_behind_one_of_a_higher_priority,
    "a reservation keeps to its node": find_another_node_free_sooner,
    "a prediction far ahead reserves nothing": predict_far_ahead,
    "what drains admits no later waiter": drain_before_the_first_waiter,
    "what is reserved stays so while readings do not tell": lose_sight_of_the_gpus,
    "a booking that ends is a date": wait_for_a_booked_gpu,
    "a reservation keeps no booked GPU from the booking's owner": wait_for_a_booked_gpu,
    "shares count for a quota": share_beyond_the_quota,
    "a time limit is enforced": reach_the_time_limit,
    "a time limit is warned of first": reach_the_time_limit,
    "a warning is durable": reach_the_time_limit,
    "a late warning leaves some time": come_back_after_the_time_limit,
    "the youngest lease makes room": need_one_of_three,
    "no lease makes room while another is leaving": need_one_of_three,
    "a reservation binds no waiter ahead of it": need_what_a_later_waiter_has_reserved,
    "a claim is the waiter's own whatever is reserved": need_what_an_owner_that_used_more_has_reserved,
    "no preemptible request has another make room": ask_for_what_another_preemptible_lease_has,
    "preemptible requests come last": ask_preemptibly_before_another,
    "an owner has no more than its quota": ask_beyond_the_quota,
    "an owner has no more than its quota, whatever its process left": reclaim_beyond_the_quota,
    "a fair share goes by weight": share_fairly,
    "the owner that used less comes first": share_fairly_without_weights,
    "what is held counts as it runs": share_fairly,
    "use is kept by compaction": share_fairly,
    "a booking counts before its date": ask_before_a_booking,
    "a booking ends": wait_for_the_end_of_a_booking,
    "preemptible leases make room for a booking": make_room_for_a_booking,
    "a date leaves room before a booking for draining": just_fit_before_a_booking,
    "a date stays while its GPUs drain": drain_before_a_booking,
    "memory alone is not use": hold_memory_and_compute_nothing,
    "unknown load is not idle": hold_where_the_load_is_unknown,
    "the warning of a holder that computes again is withdrawn": compute_again_after_a_warning,
    "an idle lease that is spared is warned with the next reading": be_spared_while_idle,
    "a lease that computes again makes room for a booking in the next step": compute_again_in_the_way_of_a_booking,
}
