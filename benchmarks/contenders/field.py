"""Who is compared: how each is asked, what it says of itself, and how much of it is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from benchmarks.contenders import servers
from benchmarks.contenders.servers import REDIS_TTL_S, Serve
from benchmarks.contenders.takers import FILELOCK_SLEEP_S, FREE_PERCENT, LOOK_S, REDIS_SLEEP_S

# Death is noticed when a lock's timeout is over: measured with one that can be waited for.
SHORT_TTL_S = 2.0

# How quickly it can be measured: one that looks now and then is waited for, one that is slow is measured rarely.
Pace: TypeAlias = Literal["fast", "looks", "slow"]

SERVERS: dict[str, Serve] = {
    "ours, full": servers.pool("full"),
    "ours, normal": servers.pool("normal"),
    "redis": servers.redis(is_durable=False),
    "redis, fsync": servers.redis(is_durable=True),
    "files": servers.files,
    "postgres": servers.postgres,
    "ray": servers.ray,
    "scheduler": servers.scheduler,
    "statistics": servers.statistics,
}


@dataclass(frozen=True)
class Contender:
    """`poll_s` is how often it looks while it waits, `shows_s` how long until others see that a GPU is taken; what is `slow` starts a process for each grant, or is late to show it."""

    name: str
    kind: str
    server: str
    client: str
    poll_s: float = 0.01
    pace: Pace = "fast"
    settings: Mapping[str, Any] = field(default_factory=dict)
    rates: tuple[int, ...] = (1, 8, 64)
    has_hand_over: bool = True
    has_reclaim: bool = True
    # What is said about who is served first.
    order: str = "says nothing"
    # For which part of the time a crowd of them is let loose on the GPUs: all of it for all who claim anything.
    crowd_share: float = 1.0
    claims_exclusion: bool = True
    shows_s: float = 0.0
    # How long many clients run before they are counted, at least, where it starts processes for them at first.
    warm_up_s: float = 0.0
    # Why some of it is not measured, where that is so.
    left_out: str = ""


PROCESS = "a process each"
A_PROCESS_EACH = "each grant starts a process, and many at once are a measure of this machine's processors"
FIELD = (
    Contender("ours, full", "pool", "ours, full", PROCESS, order="first come, first served"),
    Contender(
        "ours, normal", "pool", "ours, normal", PROCESS, rates=(1, 8), has_reclaim=False, crowd_share=0,
        left_out="it decides as `ours, full` does, and differs in when it answers: see `leases` for many clients",
    ),
    Contender(
        "Redis lock", "redis-lock", "redis", PROCESS, REDIS_SLEEP_S, "looks", has_reclaim=False,
        left_out=f"nothing is to be seen before its timeout is over: it is measured with {SHORT_TTL_S:g} s",
    ),
    Contender(
        "Redis lock, fsync", "redis-lock", "redis, fsync", PROCESS, REDIS_SLEEP_S, rates=(1, 8),
        has_hand_over=False, has_reclaim=False, crowd_share=0,
        left_out="it is the same lock, and differs in when Redis answers",
    ),
    Contender(
        f"Redis lock, timeout={SHORT_TTL_S:g} s", "redis-lock", "redis", PROCESS, REDIS_SLEEP_S,
        settings={"ttl_s": SHORT_TTL_S}, rates=(), has_hand_over=False, crowd_share=0, pace="slow",
        left_out="it differs from the other Redis lock only when a holder dies",
    ),
    Contender("Redis list", "redis-list", "redis", PROCESS, order="who waits longest is next"),
    Contender("filelock", "filelock", "files", PROCESS, FILELOCK_SLEEP_S, "looks"),
    Contender("PostgreSQL", "postgres", "postgres", PROCESS),
    Contender(
        "Ray task", "ray-task", "ray", "a thread of one driver each", pace="slow", rates=(1,), crowd_share=0,
        left_out=f"{A_PROCESS_EACH}; with max_calls=0 it is measured",
    ),
    Contender("Ray task, max_calls=0", "ray-task-reused", "ray", "a thread of one driver each", warm_up_s=6.0),
    Contender(
        "Ray actor", "ray-actor", "ray", "one driver", pace="slow", rates=(1,), crowd_share=0, left_out=A_PROCESS_EACH
    ),
    Contender(
        "simple-gpu-scheduler", "scheduler", "scheduler", PROCESS, pace="slow", rates=(1, 8),
        order="in the order of the lines", left_out=A_PROCESS_EACH,
    ),
    Contender(
        "statistics only", "statistics", "statistics", PROCESS, LOOK_S, "slow", claims_exclusion=False, shows_s=0.4,
        rates=(1,), crowd_share=0.1, left_out="it is a look at the statistics: see `serving` for many of them",
    ),
)  # fmt: skip

IN_TURN = "Each GPU's lock is tried in turn, from a random one on"
HOW = {
    "ours": (
        "This project's Python client, over HTTP to a server in a process of its own with simulated GPUs. At full a grant "
        "is on the disk before it is answered, at normal it may be soon after."
    ),
    "Ray": (
        "One node, without its dashboard, in a network namespace of its own because it listens on all addresses. A task or "
        "an actor with num_gpus=1; for each task that had a GPU Ray starts a new process, unless max_calls=0."
    ),
    "Redis lock": (
        f"redis-py's lock, with timeout={REDIS_TTL_S:g} s. {IN_TURN}; if all are taken, again after {REDIS_SLEEP_S:g} s, its "
        "default. Redis as it comes takes a snapshot now and then; with fsync (appendfsync always) each change is on the "
        "disk before it is answered."
    ),
    "Redis list": "A list of the free GPUs, taken from with BLPOP and given back to with RPUSH. The same Redis, as it comes.",
    "filelock": f"A file for each GPU. {IN_TURN}; if all are taken, again after {FILELOCK_SLEEP_S:g} s, its default.",
    "PostgreSQL": (
        f"A session's advisory locks, which are in memory. {IN_TURN} (pg_try_advisory_lock); if all are taken, it waits for "
        "a random one (pg_advisory_lock). As it comes, but for the number of connections."
    ),
    "simple-gpu-scheduler": (
        "It reads commands from its standard input. Here that is a named pipe, so that several processes can ask it at all, "
        "and a command is a small Python that says when it runs and ends when it is told to."
    ),
    "statistics only": (
        f"Take the GPU that /gpu/summary shows as the least used, if that is below {FREE_PERCENT:g} %; else look again after "
        f"{LOOK_S:g} s. What is taken shows at the next reading, of which there are ten a second, for as long as the process lives."
    ),
}
