"""What can be said of a GPU and a request: that it may be granted now, or why not.

A verdict is a code with its facts, and a sentence (`str`). Answers, the command line and the page all show the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gpu_worker_pool.core.model.bounds import show_mb, show_span


class Verdict(NamedTuple):
    code: str
    facts: Mapping[str, Any]

    @property
    def is_eligible(self) -> bool:
        return self.code == "eligible"

    @property
    def is_lasting(self) -> bool:
        """Whether it does not change while a request waits."""
        return self.code in _LASTING

    def __str__(self) -> str:
        return SENTENCES[self.code](**self.facts)


def verdict(code: str, **facts: Any) -> Verdict:
    return Verdict(code, facts)


_LASTING = {"other_node", "wrong_model", "not_among", "too_small"}


def _leased(holders: tuple[str, ...], **_: object) -> str:
    return f"leased by {', '.join(dict.fromkeys(holders))}"


def _draining(pid: int | None, memory_mb: float | None, **_: object) -> str:
    if pid is None:
        return "just released; the next reading will tell whether it is free"
    held = "memory" if memory_mb is None else f"{memory_mb / 1024:.1f} GiB"
    return f"draining: pid {pid} still holds {held}"


def _in_use_outside(  # noqa: PLR0917 - called by name
    pid: int,
    user: str | None,
    program: str | None,
    memory_mb: float | None,
    utilization_percent: float | None,
    others: int,
) -> str:
    who = f"{program or 'a process'}{f' of {user}' if user else ''} (pid {pid})"
    who += f" and {others} more" if others else ""
    held = "memory unknown" if memory_mb is None else f"{memory_mb / 1024:.1f} GiB"
    busy = "" if utilization_percent is None else f", {utilization_percent:.0f} % busy"
    return f"in use outside the pool: {who}, {held}{busy}"


def _too_small(limit_mb: float, asked_mb: float, wanted: str | None = None) -> str:
    """It has less memory than it must have, if that is `wanted`, or can give less of it than is asked."""
    if wanted is not None:
        return f"too small: {wanted} asked, and it has {show_mb(limit_mb)}"
    return f"too small: {show_mb(asked_mb)} asked, {show_mb(limit_mb)} below the memory threshold when empty"


def _no_room(committed_mb: float, asked_mb: float, limit_mb: float, holders: tuple[str, ...]) -> str:
    free_mb = max(limit_mb - committed_mb, 0.0)
    sharers = f", shared by {', '.join(dict.fromkeys(holders))}" if holders else ""
    return f"less than {show_mb(asked_mb)} left: {show_mb(free_mb)} of {show_mb(limit_mb)}{sharers}"


def _held(for_holder: str, **_: object) -> str:
    return f"reserved for {for_holder}, who is ahead in the queue"


def _booked(owner: str | None, reason: str, within_s: float, **_: object) -> str:
    whom = f"booked for {owner}" if owner else "to be taken out of service"
    whom += f" ({reason})" if reason else ""
    minutes = int(within_s // 60)
    if not minutes:
        return whom
    return f"{whom}; a request with --time {show_span(60.0 * minutes)} or less could start now"


def _over_quota(held: float, quota: int, group: str = "") -> str:
    whose = f"the quota of group {group}" if group else "its owner's quota"
    return f"{whose} is {quota} GPU{'' if quota == 1 else 's'}, {held:g} in use; preemptible requests do not count"


# What each verdict says. The parameters are its facts, some of which are shown elsewhere; None where a fact is unknown.
SENTENCES: Mapping[str, Callable[..., str]] = {
    # The lower the score (memory + utilization, in percent), the better.
    "eligible": lambda score: "available",  # noqa: ARG005
    "excluded": lambda reason: f"taken out of service: {reason}",
    "other_node": lambda wanted: f"not on {wanted}",
    "not_among": lambda wanted: f"not among the GPUs asked for: {wanted}",
    "wrong_model": lambda name, wanted: f"{name}, not {wanted}",
    "too_small": _too_small,
    "leased": _leased,
    # Its lease has ended, but processes of that lease may still be on it.
    "draining": _draining,
    "unhealthy": lambda fault: f"unhealthy: {fault}",
    "reading_unknown": lambda what: f"its {what} is unknown",
    "reading_stale": lambda age_s: f"its last reading is {age_s:.0f} s old",
    # Another server on this machine grants it; `server` says which one, and how to use that.
    "other_server": lambda server: f"{server}",
    # The process with the most memory; `others` are there too. `memory_mb` is that of all of them.
    "in_use_outside": _in_use_outside,
    "over_memory": lambda memory_percent, threshold_percent: (
        f"memory at {memory_percent:.1f} %, threshold {threshold_percent:g} %"
    ),
    "over_utilization": lambda utilization_percent, threshold_percent: (
        f"utilization at {utilization_percent:.0f} %, threshold {threshold_percent:g} %"
    ),
    "no_room": _no_room,
    "sharers_full": lambda sharers, limit: f"shared by {sharers} leases, which is the limit for a GPU",  # noqa: ARG005
    # Reserved for a waiter further ahead, or about to be its own. Its start is `from_at`, if that is known.
    "held": _held,
    # Kept for an owner in a span of time; without an owner, out of service in it.
    "booked": _booked,
    "not_taken_up": lambda: (
        "its client did not take up the GPUs that it was granted; it is passed over until it calls again"
    ),
    # Members of the group go first there, and one of them waits.
    "first_right": lambda group: (
        f"kept for group {group}, whose requests go first here; a preemptible one could start now"
    ),
    "over_quota": _over_quota,
}
