"""Bookings and planned maintenance: GPUs kept for a span of time, and what may run on them before."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import Booking
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.request import Wishes
from tests.core.build import START, WALL_OFFSET_S, Box, configured, key, of_kind, reading, refusals
from tests.core.queue.boxes import free_at_once

HOUR_S = 3600.0
NOON = START + 4 * HOUR_S


def box_of(gpus: int, **settings: float) -> Box:
    return free_at_once(*(reading(index) for index in range(gpus)), stale_after_s=1e9, **settings)


def book(
    box: Box, *gpus: GpuKey, owner: str | None = "ada", number: int = 1, hours: float | None = 2, id_: str = "course"
) -> list[ev.Event]:
    """From noon on the pool's clock, for so many hours."""
    starts_at = NOON + WALL_OFFSET_S
    ends_at = None if hours is None else starts_at + hours * HOUR_S
    booking = Booking(id_, gpus, starts_at, ends_at, owner, "a course", "root")
    return box.do(cmd.BookGpus(booking, Wishes(gpus=number)))


def test_a_request_that_lasts_into_a_booking_does_not_get_its_gpu() -> None:
    box = box_of(1)
    book(box)
    box.run_to(NOON - 0.5 * HOUR_S)

    box.ask("without")  # an hour, where nothing is known
    box.ask("too long", time_limit_s=0.5 * HOUR_S + 1)

    assert (box.stage("without"), box.stage("too long")) == ("queued", "queued")
    said = str(box.explain("without"))
    assert "booked for ada: a course; a request with --time 30m or less could start now" in said
    box.ask("in time", time_limit_s=0.5 * HOUR_S)
    assert box.stage("in time") == "active"


def test_a_booking_far_ahead_keeps_nothing_from_a_request_without_a_limit() -> None:
    box = box_of(1)
    book(box)

    box.ask("without")

    assert box.stage("without") == "active"


def test_the_last_leases_of_an_owner_tell_how_long_the_next_one_lasts() -> None:
    box = box_of(1)
    for number in range(2):
        box.ask(f"long{number}", owner="bob")
        box.pass_time(1.5 * HOUR_S)
        box.release(f"long{number}")
    book(box)  # an hour from now

    box.ask("as long", owner="bob")
    assert box.stage("as long") == "queued"
    box.ask("of another", owner="carol", time_limit_s=0.9 * HOUR_S)
    assert box.stage("of another") == "active"


def test_the_owner_gets_its_gpus_at_the_date() -> None:
    box = box_of(1)
    book(box)
    box.ask("other", owner="bob", time_limit_s=4 * HOUR_S)
    box.ask("waits", owner="carol")
    box.ask("course", owner="ada")

    box.run_to(NOON)

    assert [box.stage(id_) for id_ in ("other", "waits", "course")] == ["time_limit", "queued", "active"]


def test_after_its_end_a_booked_gpu_is_for_all() -> None:
    box = box_of(1)
    book(box)
    box.ask("waits", owner="carol")

    box.run_to(NOON + 2 * HOUR_S)

    assert (box.stage("waits"), box.state.bookings) == ("active", {})


def test_a_preemptible_lease_makes_room_in_time() -> None:
    box = box_of(1)
    book(box)
    box.ask("idle", preemptible=True)
    assert box.stage("idle") == "active"

    (warned,) = of_kind(box.run_to(NOON - 1), ev.LeaseWarned)
    box.run_to(NOON)

    assert (warned.at, box.stage("idle")) == (NOON - 60.0, "preempted")


def test_the_pool_chooses_gpus_that_are_free_by_then() -> None:
    box = box_of(3)
    box.ask("for ever")
    box.ask("ends", time_limit_s=HOUR_S)

    book(box, number=2)

    assert box.state.bookings["course"].gpus == (key(1), key(2))


def test_two_bookings_do_not_get_the_same_gpu() -> None:
    box = box_of(2)
    book(box, key(0))
    book(box, id_="other", owner="bob")
    assert box.state.bookings["other"].gpus == (key(1),)

    (refused,) = refusals(book(box, id_="third", owner="carol"), ev.RefusalCode.BOOKING)
    (taken,) = refusals(book(box, key(0), id_="fourth", owner="carol"), ev.RefusalCode.BOOKING)

    assert "no node has 1 GPU that are not booked" in str(refused)
    assert "booking course has one of these GPUs at that time, for ada" in str(taken)


def test_asking_twice_books_once_and_cancelling_frees() -> None:
    box = box_of(1)
    book(box)
    assert configured(book(box), "bookings") == []
    box.ask("waits", owner="carol")

    box.cancel_booking("course")

    assert box.stage("waits") == "active"
    assert refusals(box.cancel_booking("course"), ev.RefusalCode.BOOKING)


def test_planned_maintenance_takes_the_gpu_out_of_service_at_its_date() -> None:
    box = box_of(2)
    book(box, key(0), owner=None, hours=None)
    box.ask("long", time_limit_s=8 * HOUR_S)
    box.ask("short", time_limit_s=HOUR_S)
    assert (box.gpus_of("long"), box.gpus_of("short")) == ((key(1),), (key(0),))

    box.run_to(NOON)

    assert (box.state.excluded, box.state.bookings) == ({key(0): "a course"}, {})


def test_a_booking_in_the_past_is_refused() -> None:
    box = box_of(1)
    past = Booking("past", (), WALL_OFFSET_S, WALL_OFFSET_S + 1, "ada", "late")

    (refused,) = refusals(box.do(cmd.BookGpus(past, Wishes())), ev.RefusalCode.BOOKING)

    assert "its end has passed" in str(refused)


def test_a_gpu_that_there_is_not_cannot_be_booked() -> None:
    box = box_of(1)
    unknown = Booking("course", (), NOON + WALL_OFFSET_S, NOON + WALL_OFFSET_S + HOUR_S, "ada", "a course")

    (refused,) = refusals(box.do(cmd.BookGpus(unknown, Wishes(among=("9",)))), ev.RefusalCode.BOOKING)

    assert "this box has the GPUs 0" in str(refused)


def test_a_booking_that_must_be_free_is_refused_where_a_lease_may_last_for_longer() -> None:
    box = box_of(2, preempt_grace_s=60.0)
    box.ask("in time", owner="bob", time_limit_s=4 * HOUR_S)
    box.ask("makes room", owner="bob", preemptible=True)
    course = Booking("course", (), NOON + WALL_OFFSET_S, NOON + WALL_OFFSET_S + HOUR_S, "ada", "a course")

    assert configured(box.do(cmd.BookGpus(course, Wishes(gpus=2), must_be_free=True)), "bookings")
    for lasts_s in (None, 4 * HOUR_S + 1):
        late = box_of(1)
        late.ask("late", owner="bob", time_limit_s=lasts_s)
        (refused,) = refusals(late.do(cmd.BookGpus(course, Wishes(), must_be_free=True)), ev.RefusalCode.BOOKING)
        assert "bob may still hold" in str(refused)
        assert configured(late.do(cmd.BookGpus(course, Wishes())), "bookings"), "an administrator may"


def test_a_planned_drain_that_began_while_the_server_was_away_ends_preemptible_leases() -> None:
    box = box_of(1, preempt_grace_s=60.0)
    box.ask("guest", preemptible=True)
    book(box, key(0), owner=None, hours=None)
    box.now = NOON + 10.0

    box.restart()
    box.pass_time(0.0)
    box.observe_now(reading(0))

    assert box.state.excluded == {key(0): "a course"}
    box.run_to(NOON + 70.0)
    assert box.stage("guest") == "preempted"


def test_a_booking_does_not_make_a_preemptible_lease_last_beyond_its_limit() -> None:
    box = box_of(1, preempt_grace_s=600.0)
    box.ask("guest", preemptible=True, time_limit_s=4 * HOUR_S - 300.0)
    book(box, key(0))

    box.run_to(NOON - 300.0)

    assert box.stage("guest") in {"preempted", "time_limit"}


def test_a_restart_and_a_reboot_leave_bookings_as_they_were() -> None:
    box = box_of(1)
    book(box)
    before = dict(box.state.bookings)

    box.restart()
    assert box.state.bookings == before
    box.now = NOON - 100.0 - 5.0
    box.reboot()
    box.observe_now(reading(0))
    box.ask("waits", owner="carol")
    box.ask("short", owner="carol", time_limit_s=99.0)

    assert (box.stage("waits"), box.stage("short")) == ("queued", "active")
    assert replace(before["course"]) == box.state.bookings["course"]


def test_a_booking_can_be_widened_and_keeps_its_gpus_when_it_is_moved() -> None:
    box = box_of(2)
    book(box)

    assert book(box) == [], "asked again"
    book(box, number=2)
    assert box.state.bookings["course"].gpus == (key(0), key(1))

    book(box, number=2, hours=3)
    assert box.state.bookings["course"].ends_at == NOON + WALL_OFFSET_S + 3 * HOUR_S
    assert refusals(book(box, number=3), ev.RefusalCode.BOOKING)
    assert len(box.state.bookings["course"].gpus) == 2


def test_the_warning_for_a_booking_stays_until_the_booking_is_cancelled() -> None:
    box = free_at_once(reading(0), stale_after_s=1e9)
    box.ask("idle", preemptible=True)
    starts_at = box.now + WALL_OFFSET_S + 60.0
    box.do(cmd.BookGpus(Booking("b1", (key(0),), starts_at, starts_at + 60.0, "ada", "a course"), Wishes()))
    assert of_kind(box.pass_time(1.0), ev.LeaseWarned)
    box.ask("job")
    assert not of_kind(box.release("job"), ev.LeaseWarned)

    (event,) = of_kind(box.cancel_booking("b1"), ev.LeaseWarned)

    assert event == ev.LeaseWarned(box.now, "idle", None, box.now)


def test_what_an_owner_has_booked_does_not_stop_maintenance() -> None:
    box = box_of(1)
    book(box)
    assert configured(book(box, key(0), owner=None, hours=None, id_="fans"), "bookings")
    box.run_to(NOON)
    box.ask("late", owner="ada")
    assert (box.stage("late"), list(box.state.excluded)) == ("queued", [key(0)])


def test_a_preemptible_lease_that_ends_in_time_by_its_limit_is_left_alone() -> None:
    box = box_of(1, preempt_grace_s=2 * HOUR_S)
    book(box)
    box.run_to(NOON - HOUR_S)
    box.ask("short", preemptible=True, time_limit_s=HOUR_S / 2)
    (warned,) = of_kind(box.run_to(NOON), ev.LeaseWarned)
    assert isinstance(warned, ev.LeaseWarned)
    assert warned.reason == "time_limit"


def later_bookings(box: Box, number: int, owner: str | None, *, first: int = 0) -> list[str]:
    """Book one GPU after another for an hour each; return why the last one was refused, if it was."""
    events: list[ev.Event] = []
    for place in range(first, first + number):
        starts_at = NOON + WALL_OFFSET_S + 24 * HOUR_S + place * HOUR_S
        booking = Booking(f"{owner}{place}", (key(),), starts_at, starts_at + HOUR_S, owner, "a course")
        events = box.do(cmd.BookGpus(booking, Wishes()))
    return [event.why for event in events if isinstance(event, ev.Refused)]


def test_one_owner_does_not_fill_all_bookings() -> None:
    box = box_of(1)

    assert later_bookings(box, 32, "ada") == []
    (why,) = later_bookings(box, 1, "ada", first=32)
    assert "ada has 32 bookings already, which is the limit of one owner" in why
    assert later_bookings(box, 1, "bob", first=40) == []


def test_a_planned_drain_is_taken_however_many_bookings_there_are() -> None:
    box = box_of(1)
    for number in range(8):
        assert later_bookings(box, 32, f"owner{number}", first=100 * number) == []
    (why,) = later_bookings(box, 1, "late", first=900)
    assert "there are 256 bookings already" in why

    drain = Booking("drain", (key(),), NOON + WALL_OFFSET_S, None, None, "a new fan", "root")
    box.do(cmd.BookGpus(drain, Wishes()))
    assert "drain" in box.state.bookings
