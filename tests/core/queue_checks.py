"""What a checked pool holds against the plain model of the queue: reservations, warnings, quotas, bookings and use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.core.plain_gpus import FOREVER, Lease
from tests.core.plain_model import Model, Outcome
from tests.core.plain_plans import Reserved, warning_s


class QueueChecks:
    """Part of CheckedPool."""

    core: Any
    settings: Any
    state: Any
    model: Model
    outcomes: list[Outcome]
    just_withdrawn: set[str]
    new_booking: Any = None
    is_opening: bool = False
    observed: tuple[Any, ...] = ()

    # After every step

    def _read_use(self) -> None:
        """Take what owners used from the core, so that both order them alike to the last bit."""
        self.model.used = {owner: use.used_at(self.model.now) for owner, use in self.state.usage.items()}

    def _check_queue(self) -> None:
        model, state = self.model, self.state
        assert model.next_served(as_settled=True) is None, "a waiter that could be served is left waiting"
        assert not model.look(as_settled=True).victims, "a preemptible lease is in the way of a waiter"
        assert [lease.id for lease in model.queue()] == self.core.owners.Order(state, model.now).lease_ids()
        for owner, use in state.usage.items():
            assert use.used_at(model.now) == pytest.approx(model.used_by(owner), abs=1.0), "the wrong use"
            assert use.held == model.held(owner, firm=False)
        for lease in model.leases.values():
            if lease.state == "active":
                assert lease.limit == state.leases[lease.id].limit
                self._check_idle(lease)
        if (first := model.reservation) is not None:
            wishes = model.leases[first.lease_id].request.wishes
            assert all(model.could_do(key, wishes) for key in first.gpus), "GPUs are reserved that were not asked for"
        if self.is_opening:
            return  # what is due comes with the first tick
        for lease in model.leases.values():
            if lease.state == "active":
                self._check_warnings(lease)
        for booking in self._bookings_from_before():
            ends = booking.ends_at if booking.ends_at is not None or booking.owner else booking.starts_at
            assert ends is None or ends - model.wall > model.now, "a booking is not ended"

    def _check_warnings(self, lease: Lease) -> None:
        model = self.model
        # A warning that leaves no time is followed at once by another step.
        if lease.ending is not None and lease.warned < model.now:
            assert lease.ending[1] > model.now, "a lease was not ended when it was to be"
        if lease.ending is not None and lease.ending[0] == "preempted":
            is_spared = model.is_spared(lease, model.claims, model.reservation)
            assert not is_spared, "a lease is to make room that no waiter needs"
        if lease.limit is not None and lease.ending is None:
            assert lease.limit - warning_s(lease) > model.now, "no warning before a time limit"
        # One whose warning was withdrawn for another reason is warned of the booking in the next step.
        if lease.request.preemptible and lease.id not in self.just_withdrawn:
            is_in_the_way = any(self._is_in_the_way(lease, booking) for booking in self._bookings_from_before())
            assert lease.ending is not None or not is_in_the_way, "a preemptible lease is in the way of a booking"

    def _check_idle(self, lease: Lease) -> None:
        """Of the GPUs that were read in this step: an idle holder is warned, and one that computes is not."""
        seen = [self.model.readings[key].utilization_percent for key in lease.gpus if key in self.observed]
        if not seen or not self.settings.idle_reclaim:
            return
        idle_s = self.model.idle_s(lease)
        if lease.id in self.just_withdrawn:
            return  # it was to end when the GPUs were read, so it is warned with the next reading
        if lease.ending is None:
            assert idle_s is None or idle_s < self.settings.idle_after_s, "an idle holder is not warned"
        elif lease.ending[0] == "idle":
            computes = any(load is None or load >= self.settings.computing_percent for load in seen)
            assert not computes, "a holder that computes is to be ended as idle"

    def _bookings_from_before(self) -> list[Any]:
        """Not those of this step: what they bring about comes with the next."""
        return [booking for booking in self.model.bookings.values() if booking is not self.new_booking]

    def _is_in_the_way(self, lease: Lease, booking: Any) -> bool:
        model = self.model
        is_due = booking.starts_at - model.wall - self.settings.preempt_grace_s <= model.now
        is_own = booking.owner is not None and booking.owner == lease.owner
        is_over = lease.limit is not None and lease.limit <= booking.starts_at - model.wall
        return is_due and not is_own and not is_over and bool(set(lease.gpus) & set(booking.gpus))

    # Events

    def _LeaseWarned(self, event: Any, command: Any) -> None:  # noqa: N802
        lease, model, now = self.model.leases[event.lease_id], self.model, self.model.now
        assert lease.state == "active"
        if event.reason is None:
            self._check_withdrawn(lease)
            lease.ending = None
            self.just_withdrawn.add(lease.id)
            return
        if lease.ending is not None:
            assert event.reason == "time_limit", "warned twice"
            self._check_withdrawn(lease)
        limit = event.ends if lease.limit is None else lease.limit
        if event.reason == "time_limit":
            assert lease.limit is not None
            assert limit - warning_s(lease) <= now, "warned too early"
            assert event.ends == max(limit, now + warning_s(lease) / 6)
        elif event.reason == "idle":
            idle = model.idle_s(lease)
            assert self.settings.idle_reclaim
            assert idle is not None, "unknown is not idle"
            assert idle >= self.settings.idle_after_s, "it computes"
            assert event.ends == min(now + self.settings.preempt_grace_s, limit)
        else:
            assert lease.request.preemptible, "preempted, and not preemptible"
            self._check_preempted(lease, event)
        lease.ending, lease.warned = (str(event.reason), event.ends), now

    def _check_withdrawn(self, lease: Lease) -> None:
        """It computes again, or no waiter and no booking needs its GPUs any more."""
        model = self.model
        assert lease.ending is not None
        if lease.ending[0] == "idle":
            loads = [model.readings[key].utilization_percent for key in lease.gpus if key in self.observed]
            computes = any(load is None or load >= self.settings.computing_percent for load in loads)
            assert computes, "it does not compute"
        else:
            assert lease.ending[0] == "preempted", "a warning is withdrawn that holds"
            if not self.outcomes or self.outcomes[-1].spared is None:
                found = model.look()
                preempted = [x for x in model.leases.values() if x.ending is not None and x.ending[0] == "preempted"]
                found.spared = [x.id for x in preempted if model.is_spared(x, found.claims, found.reserved)]
                assert found.served is None
                self.outcomes.append(found)
            assert lease.id in (self.outcomes[-1].spared or ()), "a warning is withdrawn that holds"

    def _check_preempted(self, lease: Lease, event: Any) -> None:
        """It is in the way of a booking, or of the first waiter that needs room: the youngest, and no more of them."""
        now, grace_s = self.model.now, self.settings.preempt_grace_s
        starts = [b.starts_at - self.model.wall for b in self.model.bookings.values() if self._is_in_the_way(lease, b)]
        limit = FOREVER if lease.limit is None else lease.limit
        if any(event.ends == min(max(at, now + grace_s), limit) for at in starts):
            return
        # Those of one look are warned one after the other.
        if self.outcomes and lease.id in self.outcomes[-1].victims:
            victims = self.outcomes[-1].victims
        else:
            self.outcomes.append(self.model.look())
            victims = self.outcomes[-1].victims
        assert lease.id in victims, "preempted though no waiter needs it, or not the youngest"
        assert event.ends == min(now + grace_s, event.ends if lease.limit is None else lease.limit)

    def _QueueSettled(self, event: Any, command: Any) -> None:  # noqa: N802
        model, told = self.model, event.reservation
        found = (told and Reserved(told.lease_id, told.gpus, told.date, str(told.basis)), dict(event.claims))
        look = model.look()
        assert found == (look.reserved, look.claims)
        if told is not None:
            lease = model.leases[told.lease_id]
            assert len({key.node for key in told.gpus}) == lease.request.wishes.nodes
            assert lease.state == "queued"
        model.reservation, model.claims = told, dict(event.claims)

    def _set_quotas(self, event: Any, command: Any) -> None:
        if event.value is None:
            self.model.quotas.pop(event.key[0], None)
        else:
            self.model.quotas[event.key[0]] = event.value

    def _set_groups(self, event: Any, command: Any) -> None:
        self.model.groups.pop(event.key[0], None)
        if event.value is not None:
            others = {key for group in self.model.groups.values() for key in group.first_right}
            assert event.value.members, "a group has no members"
            assert not others & set(event.value.first_right), "two groups have first right on one GPU"
            self.model.groups[event.key[0]] = event.value

    def _set_bookings(self, event: Any, command: Any) -> None:
        if event.value is None:
            self._check_booking_ended(event, command)
            return
        booking, wanted = event.value, command.booking
        assert replace(booking, gpus=wanted.gpus) == wanted
        assert set(booking.gpus) == set(wanted.gpus) or not wanted.gpus
        assert wanted.gpus or len(set(booking.gpus)) == command.wishes.gpus
        assert len({key.node for key in booking.gpus}) == 1
        for other in self.model.bookings.values():
            is_later = other.ends_at is not None and other.ends_at <= booking.starts_at
            is_earlier = booking.ends_at is not None and booking.ends_at <= other.starts_at
            is_apart = is_later or is_earlier or not set(other.gpus) & set(booking.gpus)
            assert other.id == booking.id or is_apart or (booking.is_drain and not other.is_drain)
        self.model.bookings[booking.id] = self.new_booking = booking

    def _check_booking_ended(self, event: Any, command: Any) -> None:
        booking = self.model.bookings.pop(event.key[0])
        if isinstance(command, self.core.commands.Configure) and command.key == event.key:
            return
        ends = booking.starts_at if booking.ends_at is None else booking.ends_at
        assert ends - self.model.wall <= self.model.now, "a booking has ended before its time"
        if booking.ends_at is None:
            assert booking.owner is None
            assert set(booking.gpus) <= self.model.excluded, "GPUs were to be out of service"

    # What leases leave behind

    def _count_use(self, lease: Lease, event: Any) -> None:
        if lease.state != "active":
            return
        model = self.model
        model.spans.setdefault(lease.owner, []).append((lease.weight, lease.granted_at, event.ended_at))
        if event.reason in {"released", "holder_died", "expired", "time_limit"}:
            lasted_s = max(event.ended_at - lease.granted_at, 0.0)
            model.lasted.setdefault(lease.owner, []).append(lasted_s)
            model.all_lasted.append(lasted_s)

    def _lose_claims(self, lease: Lease) -> None:
        model = self.model
        if model.reservation is not None and model.reservation.lease_id == lease.id:
            model.reservation = None
        model.claims = {key: claimer for key, claimer in model.claims.items() if claimer != lease.id}
