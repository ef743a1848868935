"""The terms of a lease in words: when it will start, until when it may last, and what is said about it meanwhile."""

from __future__ import annotations

from gpu_worker_pool.cli.units import show_duration, show_moment
from gpu_worker_pool.core.model.bounds import show_span
from gpu_worker_pool.wire.leases import LeaseView
from gpu_worker_pool.wire.reader import read_time


def show_terms(view: LeaseView, now: float) -> list[str]:
    """`ends 16:20`, or `ends in 40s: time limit` after a warning; `preemptible`; `idle 45m`."""
    if view.state not in {"active", "queued"}:
        return []
    ends = []
    if view.warning is not None:
        ends = [f"ends in {show_duration(view.warning.ends_in_s)}: {view.warning.reason.replace('_', ' ')}"]
    elif view.ends_at is not None:
        ends = [f"ends {show_moment(read_time(view.ends_at), now)}"]
    elif view.time_limit_s is not None:
        ends = [f"for {show_span(view.time_limit_s)}"]
    idle = [] if view.idle_s is None else [f"idle {show_duration(view.idle_s)}"]
    return [*ends, *(["preemptible"] if view.preemptible else []), *idle]


def show_start(view: LeaseView, now: float) -> str:
    """When a waiter will probably start, and what that rests on; empty if it is not known."""
    at = read_time(view.expected_start_at)
    if at is None:
        return ""
    if at <= now:
        return "any moment now"
    if view.expected_start_basis != "declared":
        return f"probably about {show_moment(at, now)}, judging by earlier jobs"
    holder, bracket, task = (view.expected_after or "").partition(" (")
    condition = f", if {holder}'s job{bracket}{task} ends when it said" if holder else ""
    return f"probably at {show_moment(at, now)}{condition}"


def short_start(view: LeaseView, now: float) -> str:
    """The same in a word: `14:20`, or `~14:20` if it rests on predictions."""
    at = read_time(view.expected_start_at)
    if at is None:
        return ""
    return ("" if view.expected_start_basis == "declared" else "~") + show_moment(max(at, now), now)
