"""Events and leases to write: one of each kind, and a strategy over all there can be."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.configured import AccessToken, Booking, Quota, Role, Value
from gpu_worker_pool.core.model.gpu import GpuKey, InventoryGpu, ProcessId
from gpu_worker_pool.core.model.lease import EndedLease, EndReason, LeaseUse
from gpu_worker_pool.core.model.request import (
    GPU_NAME,
    MAX_GPUS,
    MAX_NAME,
    MAX_PRIORITY,
    MAX_TIME_LIMIT_S,
    Holder,
    Request,
    Wishes,
)

GPU = GpuKey("box", "GPU-0")
OTHER = GpuKey("box", "GPU-1")
REQUEST = Request(
    Wishes(2, 8000, "A100", 50.5, None),
    Holder("w1", "alice", "box", 4711, 12.25, "boot1", "pid:[1]", ProcessId(4711, 12.25)),
    -3,
    30.0,
    (("job", "train"), ("lang", "Ünïcode")),
)

# One of each kind, with every field set.
EVENTS: tuple[ev.DurableEvent, ...] = (
    ev.TakenOver(1.5, 3, "boot1", -0.5, 1.7e9),
    ev.HistoryCondensed(2.0, (ev.NodeFence("box", 7), ev.NodeFence("other", 1)), 12),
    ev.LeaseQueued(3.0, "a", REQUEST, 12, 1700000003.125),
    ev.LeaseGranted(4.0, "a", (GPU, OTHER), 8, 4.5),
    ev.ProcessesAttributed(5.0, "a", GPU, (ProcessId(4711, 12.25), ProcessId(4712))),
    ev.LeaseEnded(6.0, "a", EndReason.HOLDER_DIED, (GPU,), 6.5),
    ev.GpuDrained(7.0, "a", GPU),
    ev.Configured(8.0, "excluded", OTHER, "repair"),
    ev.Configured(9.0, "excluded", OTHER, None),
    ev.Configured(10.0, "ignored_processes", ("Xorg",), "root"),
    ev.Configured(11.0, "new_gpus", ("",), "restored"),
    ev.LeaseWarned(12.0, "a", EndReason.TIME_LIMIT, 72.0),
    ev.Configured(
        13.0, "quotas", ("alice",), Quota(2, weight=1.5, max_priority=10, max_time_limit_s=7200.0, max_queued=50)
    ),
    ev.UseCounted(14.0, "alice", 1234.5, 13.5, (60.0, 90.25)),
    ev.Configured(
        15.0, "bookings", ("b1",), Booking("b1", (GPU, OTHER), 1.7e9, 1700014400.0, "alice", "a course", "root")
    ),
    ev.NodeJoined(
        17.0, "box", "boot1", (InventoryGpu("GPU-0", 0, "A100", 81920.0), InventoryGpu("GPU-1", 1, "T4", None))
    ),
    ev.GrantWithdrawn(16.0, "a"),
    ev.NodeRebooted(18.0, "box", "boot2"),
    ev.NodeForgotten(20.0, "box"),
    ev.LeaseExtended(21.0, "a", (OTHER,), 1000),
    ev.Configured(
        22.0, "tokens", ("ab" * 32,), AccessToken("ab" * 32, "alice", Role.OPERATOR, 1.7e9, "root", "her laptop")
    ),
    ev.WallTimeSet(1.75, 1.7e9),
    ev.LeasesMeasured(23.0, (LeaseUse("a", 30720.5, 1234.5, 20), LeaseUse("b", None, 97.0, 1))),
    ev.LeaseGranted(23.0, "b", (GPU,), 9, 23.5, 83.0, 250, 5.0, REQUEST, 13, 22.5),
)
ENDED = EndedLease("a", REQUEST, (GPU, OTHER), 8, 1700000003.125, 1700000004.0, 1700000006.0, EndReason.HOLDER_DIED)


def ended(lease_id: str, *, ended_at: float = 1.0) -> EndedLease:
    return replace(ENDED, id=lease_id, ended_at=ended_at)


def note(number: int) -> ev.DurableEvent:
    """A small event that can be told from others."""
    return ev.UseCounted(float(number), f"program {number}", 1.0, 0.0, ())


def numbers(history_events: tuple[ev.DurableEvent, ...]) -> list[int]:
    """Which notes these are."""
    return [int(event.at) for event in history_events]


# All there can be. Texts include halves of surrogate pairs and zeros, floats infinities; only a NaN equals nothing.

texts = st.text(st.characters(), max_size=12)
floats = st.floats(allow_nan=False) | st.integers(-(2**53), 2**53)
wholes = st.integers(-(2**62), 2**62)
gpus = st.builds(GpuKey, texts, texts)
some_gpus = st.lists(gpus, max_size=3).map(tuple)
processes = st.builds(ProcessId, wholes, st.none() | floats)
percents = st.none() | st.floats(0, 100)
wishes = st.builds(
    Wishes,
    st.integers(1, MAX_GPUS),
    st.none() | st.floats(1, 1e9) | st.integers(1, 10**9),
    st.none() | texts.filter(lambda text: all(part.strip() for part in text.split(","))),
    percents,
    percents,
    st.none()
    | st.lists(
        st.from_regex(GPU_NAME, fullmatch=True).filter(lambda name: len(name) <= MAX_NAME), min_size=1, max_size=3
    ),
)
optional = st.none() | texts
holders = st.builds(
    Holder,
    optional,
    optional,
    optional,
    st.none() | wholes,
    st.none() | floats,
    optional,
    optional,
    st.none() | processes,
)
requests = st.builds(
    Request,
    wishes,
    holders,
    st.integers(-MAX_PRIORITY, MAX_PRIORITY),
    st.floats(0.1, 3600.0),
    st.lists(st.tuples(texts, texts), max_size=3).map(tuple),
    time_limit_s=st.none() | st.floats(1, MAX_TIME_LIMIT_S),
    preemptible=st.booleans(),
)
some_floats = st.lists(floats, max_size=2).map(tuple)
counts = st.none() | st.integers(0, 1_000_000)
quotas = st.builds(
    Quota,
    gpus=counts,
    weight=st.floats(0.001, 1e6),
    max_priority=st.none() | st.integers(-MAX_PRIORITY, MAX_PRIORITY),
    max_time_limit_s=st.none() | st.floats(1, MAX_TIME_LIMIT_S),
    max_queued=counts,
)
bookings = st.builds(Booking, texts, some_gpus, floats, st.none() | floats, optional, texts, optional)
reasons = st.sampled_from(EndReason)
tokens = st.builds(
    AccessToken,
    st.binary(min_size=32, max_size=32).map(bytes.hex),
    st.from_regex(r"[A-Za-z0-9._@-]{1,64}", fullmatch=True),
    st.sampled_from(Role),
    floats,
    optional,
    texts.map(lambda text: "".join(filter(str.isprintable, text))[:200]),
)

TABLES: dict[str, st.SearchStrategy[Value]] = {
    "excluded": texts,
    "new_gpus": texts,
    "ignored_processes": texts,
    "quotas": quotas,
    "tokens": tokens,
    "bookings": bookings,
}
BY_KIND: dict[type[ev.DurableEvent], st.SearchStrategy[ev.DurableEvent]] = {
    ev.TakenOver: st.builds(ev.TakenOver, floats, wholes, texts, floats, floats),
    ev.WallTimeSet: st.builds(ev.WallTimeSet, floats, floats),
    ev.NodeJoined: st.builds(
        ev.NodeJoined,
        floats,
        texts,
        texts,
        st.none() | st.lists(st.builds(InventoryGpu, texts, wholes, texts, st.none() | floats), max_size=3).map(tuple),
        optional,
    ),
    ev.NodeRebooted: st.builds(ev.NodeRebooted, floats, texts, texts),
    ev.NodeForgotten: st.builds(ev.NodeForgotten, floats, texts),
    ev.GrantWithdrawn: st.builds(ev.GrantWithdrawn, floats, texts),
    ev.LeaseExtended: st.builds(ev.LeaseExtended, floats, texts, some_gpus, wholes),
    ev.HistoryCondensed: st.builds(
        ev.HistoryCondensed,
        floats,
        st.lists(st.builds(ev.NodeFence, texts, wholes), max_size=3).map(tuple),
        wholes,
        some_floats,
    ),
    ev.LeaseQueued: st.builds(ev.LeaseQueued, floats, texts, requests, wholes, floats),
    ev.LeaseGranted: st.builds(
        ev.LeaseGranted,
        floats,
        texts,
        some_gpus,
        wholes,
        floats,
        st.none() | floats,
        st.none() | wholes,
        st.none() | floats,
        st.none() | requests,
        wholes,
        st.none() | floats,
    ),
    ev.LeaseWarned: st.builds(ev.LeaseWarned, floats, texts, st.none() | reasons, floats),
    ev.Configured: st.one_of(
        [
            st.builds(
                ev.Configured,
                floats,
                st.just(table),
                gpus if table == "excluded" else st.tuples(texts),
                st.none() | values,
            )
            for table, values in TABLES.items()
        ]
    ),
    ev.UseCounted: st.builds(ev.UseCounted, floats, optional, floats, floats, some_floats),
    ev.LeaseEnded: st.builds(
        ev.LeaseEnded,
        floats,
        texts,
        reasons,
        some_gpus,
        floats,
        peak_memory_mb=st.none() | floats,
        mean_utilization_percent=st.none() | floats,
    ),
    ev.LeasesMeasured: st.builds(
        ev.LeasesMeasured,
        floats,
        st.lists(st.builds(LeaseUse, texts, st.none() | floats, floats, wholes), max_size=3).map(tuple),
    ),
    ev.GpuDrained: st.builds(ev.GpuDrained, floats, texts, gpus),
    ev.ProcessesAttributed: st.builds(
        ev.ProcessesAttributed, floats, texts, gpus, st.lists(processes, max_size=3).map(tuple)
    ),
}
events = st.one_of(list(BY_KIND.values()))
ended_leases = st.builds(
    EndedLease, texts, requests, some_gpus, st.none() | wholes, floats, st.none() | floats, floats, reasons
)
