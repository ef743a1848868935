"""Reads the lines that workers wrote while they used a pool, and finds the promises that were broken.

The tests in tests/e2e share this checker. It is pure: lines in, violations out. What the lines are, and
what a tenure is, stands in run_history.py.

- `held_twice`: two tenures of one GPU overlap; `overfull`: sharers exceed the memory of a GPU;
- `lock`: a witness was taken although no earlier holder overstayed its safe time;
- `stale_write`: a resource that compares fences would refuse a write made within the writer's safe time;
- `fence`: a later grant does not have a higher fence;
- `order`: a request was served before one for the same that certainly came earlier, or is more important;
- `unserved`: a request was never served, and a GPU is free or the server does not know the request;
- `lost`: a lease or a queue position was acknowledged, and is unknown, changed, or not ended by its holder;
- `short`: a renewal gave less than the TTL; `resurrected`: a lease lived after its end;
- `dead_holder`: no waiter got the GPU of a dead holder; `death_unnoticed`: a healthy server did not notice a local death;
- `outsider`: a GPU was granted exclusively long after a process outside the pool came to it, and before it left;
- `second_server`: another server of the same machine granted a GPU of the server that was there first;
- `starved`: many requests of another client cost a remote holder its lease, though the server was well;
- `lost_by_outage`: a local holder lost its GPU, or gave it up, because the server was away;
- `left_over`: leases are left when all workers have gone, or what is left could not be read; `answer`: an honest client was refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise, product
from math import inf
from operator import attrgetter
from typing import NamedTuple

from tests.e2e.run_history import LeaseRecord, RunHistory

BY_THE_HOLDER = frozenset({"released", "cancelled"})
GIVEN_UP = frozenset({"lost", "gave up"})
ROUNDED_S = 0.001
# A reading may be this old when a GPU is granted on it, and a little more passes until the grant is known.
OUTSIDER_SEEN_S = 6.0
# A waiter whose connection broke has at least PROMPT_S to take up a grant, others TAKE_UP_S.
PROMPT_S = 2.0
TAKE_UP_S = 5.0
# 502: a box of a fleet had passed the call on when its leader died.
HONEST_STATUSES = frozenset({200, 201, 202, 404, 429, 502, 503})


class Violation(NamedTuple):
    """A broken promise."""

    kind: str
    text: str


def check(history: RunHistory, *, is_fleet: bool = False) -> list[Violation]:
    """Return everything that is wrong with this history. In a fleet each node has fences of its own, so that they do not
    tell which of two leases on different nodes was granted first.
    """
    by_fences = () if is_fleet else (check_fences, check_order)
    checks = (
        check_held_twice,
        check_locks,
        check_resources,
        check_fences_of_gpus,
        *by_fences,
        check_unserved,
        check_kept,
        check_answers,
        check_deaths,
        check_outsiders,
        check_second_server,
        check_starved,
        check_outages,
    )
    return [violation for one in checks for violation in one(history)]


# --- who had what, and when ----------------------------------------------------------------------------------------


def check_held_twice(history: RunHistory) -> Iterator[Violation]:
    """No GPU has two holders at once, and sharers fit."""
    on_gpu: dict[str, list[LeaseRecord]] = defaultdict(list)
    for lease in history.tenures:
        for uuid in lease.uuids if lease.took_at < lease.ended_at else ():
            here = [other for other in on_gpu[uuid] if other.ended_at > lease.took_at]
            for other in here:
                if None in {lease.wishes[1], other.wishes[1]}:
                    both_ms = 1000 * (min(lease.ended_at, other.ended_at) - lease.took_at)
                    text = f"{_gpu(lease, uuid)}: {lease} had it while {other} did, for {both_ms:.0f} ms"
                    yield Violation("held_twice", text)
            here.append(lease)
            together_mb = sum(other.wishes[1] or 0.0 for other in here)
            if together_mb > history.usable_mb:
                yield Violation("overfull", f"{together_mb} MB on {_gpu(lease, uuid)}: {', '.join(map(str, here))}")
            on_gpu[uuid] = here


def check_locks(history: RunHistory) -> Iterator[Violation]:
    """Each witness could be locked, unless an earlier holder overstayed."""

    def overstayed(other: LeaseRecord, at: float) -> bool:
        freed_at = min(other.unlocked_at, history.killed.get(other.who, {}).get("reaped_at", inf))
        return other.took_at < at and other.ended_at < at < freed_at

    for line in history.of_kind("witness_busy"):
        lease, uuid, at = history.leases[line["lease"]], line["uuid"], line["at"]
        others = [other for other in history.tenures if other is not lease and uuid in other.uuids]
        if not any(overstayed(other, at) for other in others):
            yield Violation("lock", f"{_gpu(lease, uuid)}: {lease} was granted it, and its lock was taken")


def check_resources(history: RunHistory) -> Iterator[Violation]:
    """A write that its fence makes too late was made after the writer's safe time."""
    wrote = {(line["lease"], line["write"]): line for line in history.of_kind("wrote")}
    for uuid, lines in history.resources.items():
        newest = -1
        for line in lines:
            # Unknown where the writer was stopped and killed in between.
            write = wrote.get((line["lease"], line["write"])) if line["fence"] < newest else None
            newest = max(newest, line["fence"])
            if write is not None and write["at"] < write["until"]:
                yield Violation("stale_write", f"{line['lease']} wrote to {uuid} with {line['fence']} after {newest}")


def check_fences(history: RunHistory) -> Iterator[Violation]:
    """No two grants have one fence, and a later grant has a higher one."""
    granted = sorted((one for one in history.leases.values() if one.fence is not None), key=attrgetter("granted_at"))
    by_fence: dict[int, LeaseRecord] = {}
    for lease in granted:
        other = by_fence.setdefault(_fence(lease), lease)
        if other is not lease:
            yield Violation("fence", f"{lease} and {other} have the same fence")
    waiting, highest = iter([*granted, None]), None
    earlier = next(waiting)
    for later in sorted(granted, key=attrgetter("asked_at")):
        while earlier is not None and earlier.granted_at <= later.asked_at:
            highest = earlier if highest is None or _fence(earlier) > _fence(highest) else highest
            earlier = next(waiting)
        if highest is not None and _fence(highest) > _fence(later):
            yield Violation("fence", f"{later} was asked for when {highest} was held already")


def check_fences_of_gpus(history: RunHistory) -> Iterator[Violation]:
    """A later holder of a GPU has a higher fence."""
    for uuid, tenures in history.holders().items():
        for earlier, later in pairwise(tenures):
            if _fence(earlier) > _fence(later):
                yield Violation("fence", f"on {_gpu(later, uuid)}, {later} came after {earlier}")


# --- first come, first served --------------------------------------------------------------------------------------


def check_order(history: RunHistory) -> Iterator[Violation]:
    """Of two requests for the same, the one that certainly came first, and is not less important, is served first.

    Certainly: its worker learned that it is in the queue before the other request was made. Fences tell which was
    served first. A request that left the queue has no fence, or was last seen waiting before the other was served. A worker
    that did not take a grant up in time, because it was stopped or its calls had no answer, is passed over until it calls.
    """
    groups: dict[object, list[LeaseRecord]] = defaultdict(list)
    for lease in history.leases.values():
        groups[lease.wishes].append(lease)
    for leases in groups.values():
        queued = [lease for lease in leases if lease.queued_at < inf]
        granted = [lease for lease in leases if lease.fence is not None]
        for first, second in product(queued, granted):
            if first.priority >= second.priority and _was_there(first, second.granted_at):
                yield from _check_pair(first, second)


def _was_there(lease: LeaseRecord, at: float) -> bool:
    """Whether the calls of a waiter were answered, one soon after the other, while another one was granted a GPU and took it up."""
    until = min(at, lease.granted_at)
    since = max(until - 2 * TAKE_UP_S, lease.queued_at)
    heard_at = since
    for line in lease.lines:
        if "sent" not in line or line["at"] < since or line["sent"] > until:
            continue
        if line["what"] == "failed" or line["sent"] - heard_at > PROMPT_S:
            return False
        heard_at = line["at"]
    return until - heard_at <= PROMPT_S


def _check_pair(first: LeaseRecord, second: LeaseRecord) -> Iterator[Violation]:
    is_served_later = first.fence is not None and first.fence > _fence(second)
    if first.queued_at <= second.asked_at < first.granted_at and is_served_later:
        yield Violation("order", f"{second} was served before {first}, which had been in the queue for longer")
    elif first.queued_at < second.asked_at and second.granted_at < first.waited_until:
        yield Violation("order", f"{first} still waited when {second}, which was asked for later, had been served")
    elif first.priority > second.priority and first.queued_at < second.waited_until and is_served_later:
        yield Violation("order", f"{first} was served after {second}, which is less important and waited as well")


def check_unserved(history: RunHistory) -> Iterator[Violation]:
    """No request waits while a GPU is free, and none is forgotten."""
    pool = next(history.of_kind("pool"), None)
    known, free = (pool["leases"], pool["free"]) if pool else ([], [])
    gone = {line["who"] for line in history.of_kind("exits")} | set(history.killed)
    for lease in history.leases.values():
        if lease.fence is None and not lease.is_over and lease.who not in gone and (lease.id not in known or free):
            is_free = f", and GPU {free[0]} is free" if lease.id in known else ""
            yield Violation("unserved", f"{lease} was never served{is_free}")


# --- what was promised ---------------------------------------------------------------------------------------------


def check_kept(history: RunHistory) -> Iterator[Violation]:
    """What was acknowledged is kept: a grant through its safe time, a queue position through its TTL, an end."""
    for lease in history.leases.values():
        yield from check_lease_kept(lease)
    for line in history.of_kind("could_not_go_on"):
        yield Violation("lost", f"{line['who']} could not go on: {line['reason']}")


def check_lease_kept(lease: LeaseRecord) -> Iterator[Violation]:
    """What was acknowledged of one lease is kept."""
    deletes = [line["sent"] for line in lease.lines if line.get("call") == "DELETE"]
    released_at = min([*deletes, *(line["left_at"] for line in lease.lines if line["what"] == "left")], default=inf)
    is_acknowledged, safe_until, ended_at = False, -inf, inf
    for line in lease.lines:
        what, state, at = line["what"], line.get("state"), line["at"]
        is_alive = what == "renewed" or state in {"active", "queued"}
        if is_alive and line["sent"] > ended_at:
            yield Violation("resurrected", f"{lease} is alive at {at:.3f} and had ended at {ended_at:.3f}")
        if what == "renewed" and line["left_s"] < lease.ttl_s - (at - line["sent"]) - ROUNDED_S:
            yield Violation("short", f"{lease} was renewed for {line['left_s']} of {lease.ttl_s} s")
        if what in {"took", "renewed"} or state == "active":
            safe_until = max(safe_until, line.get("until", inf))
        elif state == "queued":
            if line["sent"] > lease.granted_at:
                yield Violation("lost", f"{lease} was active and is queued at {at:.3f}")
            safe_until = max(safe_until, line["sent"] + lease.ttl_s)
        if line.get("fence") is not None and (line["fence"], tuple(line["uuids"])) != (lease.fence, lease.uuids):
            yield Violation("lost", f"{lease} on {lease.uuids} was later {line['fence']} on {line['uuids']}")
        if what == "answered" and line["status"] == 404 and is_acknowledged:
            yield Violation("lost", f"{lease} is unknown at {at:.3f}")
        reason = line["reason"] if what == "lost" else line.get("end_reason")
        if reason is not None:
            is_own_doing = reason in BY_THE_HOLDER and at > released_at
            # An operator or the server releases the lease of a client that was not told of it and does not ask again.
            is_strange = reason == "unknown" or (reason in BY_THE_HOLDER and line.get("ended_by") is None)
            if not is_own_doing and (at < safe_until or is_strange):
                yield Violation("lost", f"{lease} is lost at {at:.3f}, safe until {safe_until:.3f}: {reason}")
            ended_at = min(ended_at, at)
        is_acknowledged = is_acknowledged or what == "took" or state in {"queued", "active"}


def check_answers(history: RunHistory) -> Iterator[Violation]:
    """No request is refused that an honest client may make."""
    for line in history.of_kind("answered"):
        if line["status"] not in HONEST_STATUSES:
            yield Violation("answer", f"{line['call']} of {line['lease']}: {line['status']} {line.get('detail')}")


# --- through deaths and restarts -----------------------------------------------------------------------------------


def check_deaths(history: RunHistory) -> Iterator[Violation]:
    """The GPUs of the dead are used again, a local death is noticed at once, and nothing is left when all have gone."""
    last_took_at = {uuid: lease.took_at for lease in history.tenures for uuid in lease.uuids}
    last_of = {lease.who: lease for lease in history.tenures}
    for worker, line in history.killed.items():
        lease = last_of.get(worker)
        # Without waiters, perhaps no worker needed the GPU any more.
        if lease is not None and lease.was_killed and line.get("has_waiters", True):
            for uuid in lease.uuids:
                if last_took_at[uuid] <= line["at"]:
                    text = f"{_gpu(lease, uuid)} of {lease}, which was killed, was not handed on"
                    yield Violation("dead_holder", text)
    for line in history.of_kind("death_unnoticed"):
        yield Violation("death_unnoticed", f"{line['lease']} is {line['state']} {line['after_s']:.2f} s after")
    for line in history.of_kind("final"):
        if not line.get("is_read", True):
            yield Violation("left_over", "the pool could not be read, so what is left is not known")
        for lease_is in line["leases"]:
            yield Violation("left_over", f"lease {lease_is}")
        if any(state != "free" for state in line["gpus"]):
            yield Violation("left_over", f"GPUs {line['gpus']}")


# --- beside others on the machine ----------------------------------------------------------------------------------


def check_outsiders(history: RunHistory) -> Iterator[Violation]:
    """A GPU that a process outside the pool uses is not granted exclusively."""
    came_at: dict[str, float] = {}
    for line in history.lines:
        if line["what"] == "outsider_came":
            came_at[line["uuid"]] = line["at"]
        elif line["what"] == "outsider_left":
            uuid = line["uuid"]
            seen_at, left_at = came_at.pop(uuid) + OUTSIDER_SEEN_S, line["at"]
            for lease in history.leases.values():
                is_on_it = uuid in lease.uuids and lease.wishes[1] is None
                if is_on_it and lease.certainly_waited_until > seen_at and lease.granted_at < left_at:
                    yield Violation("outsider", f"{_gpu(lease, uuid)} was granted to {lease} beside a foreign process")


def check_second_server(history: RunHistory) -> Iterator[Violation]:
    """No other server of the machine grants these GPUs."""
    for line in history.of_kind("second_server"):
        for uuid in line["granted"]:
            yield Violation("second_server", f"it granted {uuid}")


def check_starved(history: RunHistory) -> Iterator[Violation]:
    """No number of requests keeps the heartbeats of others out."""
    for line in history.of_kind("starved"):
        yield Violation("starved", f"the holder of {line['lease']} lost it to a flood of requests")


def check_outages(history: RunHistory) -> Iterator[Violation]:
    """A local holder keeps its lease while its process lives, however long the server is away."""
    for away in history.of_kind("server_away"):
        for lease in history.tenures:
            if lease.is_local and lease.took_at < away["at"]:
                lines = [line for line in lease.lines if line["at"] > away["at"]]
                if any(line["what"] == "lost" or line.get("why") in GIVEN_UP for line in lines):
                    yield Violation("lost_by_outage", f"{lease} had it when the server went away, and lost it")


def _fence(lease: LeaseRecord) -> int:
    return lease.fence or 0


def _gpu(lease: LeaseRecord, uuid: str) -> str:
    index = dict(zip(lease.uuids, lease.gpu_ids, strict=False)).get(uuid, "")
    return f"GPU {index} ({uuid})"
