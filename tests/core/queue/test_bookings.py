"""Bookings and planned maintenance: GPUs kept for a span of time, and what may run on them before."""

from __future__ import annotations

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import Booking
from gpu_worker_pool.core.model.gpu import GpuKey
from gpu_worker_pool.core.model.request import Wishes
from tests.core.build import START, WALL_OFFSET_S, Box, configured, free_at_once, key, reading, refusals

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


def test_a_booking_in_the_past_is_refused() -> None:
    box = box_of(1)
    past = Booking("past", (), WALL_OFFSET_S, WALL_OFFSET_S + 1, "ada", "late")

    (refused,) = refusals(box.do(cmd.BookGpus(past, Wishes())), ev.RefusalCode.BOOKING)

    assert "its end is in the past" in str(refused)


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


def test_what_an_owner_has_booked_does_not_stop_maintenance() -> None:
    box = box_of(1)
    book(box)
    assert configured(book(box, key(0), owner=None, hours=None, id_="fans"), "bookings")
    box.run_to(NOON)
    box.ask("late", owner="ada")
    assert (box.stage("late"), list(box.state.excluded)) == ("queued", [key(0)])


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
    assert "there are 256 bookings, which is the limit" in why

    drain = Booking("drain", (key(),), NOON + WALL_OFFSET_S, None, None, "a new fan", "root")
    box.do(cmd.BookGpus(drain, Wishes()))
    assert "drain" in box.state.bookings
