"""Who is compared: how each is asked, what it says of itself, and how much of it is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import contenders_servers as servers
from contenders_servers import REDIS_TTL_S, Serve
from contenders_takers import FILELOCK_SLEEP_S, LOOK_S, REDIS_SLEEP_S

# Death is noticed when a lock's timeout is over: measured with one that can be waited for.
SHORT_TTL_S = 3.0

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
    """`poll_s` is how often it looks while it waits, `shows_s` how long until others see that a GPU is taken; `is_slow` says that each grant starts a process."""

    name: str
    kind: str
    server: str
    client: str
    poll_s: float = 0.01
    is_slow: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    rates: tuple[int, ...] = (1, 8, 64)
    has_hand_over: bool = True
    has_reclaim: bool = True
    # What is said about who is served first, and whether 64 of them are let loose on the GPUs.
    order: str = "says nothing"
    has_crowd: bool = True
    # Those who say nothing at all about it are watched for a shorter time.
    claims_exclusion: bool = True
    shows_s: float = 0.0


PROCESS = "a process each"
FIELD = (
    Contender("ours, full", "pool", "ours, full", PROCESS, order="first come, first served"),
    Contender("ours, normal", "pool", "ours, normal", PROCESS, has_reclaim=False, has_crowd=False),
    Contender("Redis lock", "redis-lock", "redis", PROCESS, REDIS_SLEEP_S, has_reclaim=False),
    Contender(
        "Redis lock, fsync", "redis-lock", "redis, fsync", PROCESS, REDIS_SLEEP_S,
        has_hand_over=False, has_reclaim=False, has_crowd=False,
    ),
    Contender(
        f"Redis lock, timeout={SHORT_TTL_S:g} s", "redis-lock", "redis", PROCESS, REDIS_SLEEP_S,
        settings={"ttl_s": SHORT_TTL_S}, rates=(), has_hand_over=False, has_crowd=False, is_slow=True,
    ),
    Contender("Redis list", "redis-list", "redis", PROCESS, order="who waits longest is next"),
    Contender("filelock", "filelock", "files", PROCESS, FILELOCK_SLEEP_S),
    Contender("PostgreSQL", "postgres", "postgres", PROCESS),
    Contender("Ray task", "ray-task", "ray", "a thread of one driver each", is_slow=True, rates=(1, 8), has_crowd=False),
    Contender("Ray task, max_calls=0", "ray-task-reused", "ray", "a thread of one driver each"),
    Contender("Ray actor", "ray-actor", "ray", "one driver", is_slow=True, rates=(1,), has_crowd=False),
    Contender("simple-gpu-scheduler", "scheduler", "scheduler", PROCESS, is_slow=True, order="in the order of the lines"),
    Contender("statistics only", "statistics", "statistics", PROCESS, LOOK_S, claims_exclusion=False, shows_s=0.4),
)  # fmt: skip

# (m): measured in this run, see the tables; (d): their documentation says so.
GUARANTEES = (
    (
        "ours",
        "yes: a grant is on the disk before it is answered, at full (d)",
        "at once on the same machine (m), else when the lease runs out (d)",
        "first come, first served, by priority (m, d)",
        "yes, a request waits at all of them (d)",
    ),
    (
        "Ray",
        "no: by default all ends with the head node (d)",
        "yes (m)",
        "nothing is said",
        "yes (d)",
    ),
    (
        "Redis lock",
        "as much as Redis was told to keep: by default snapshots (d)",
        f"when its timeout is over (m); {REDIS_TTL_S:g} s here, and nobody renews it by itself (d)",
        "nothing is said",
        "yes, a lock is a name (d)",
    ),
    (
        "Redis list",
        "as much as Redis was told to keep: by default snapshots (d)",
        "no: the GPU is gone with its holder (m)",
        "who has waited longest (m, d)",
        "yes, a GPU is a name (d)",
    ),
    (
        "filelock",
        "there is none",
        "yes (m)",
        "nothing is said",
        "as far as a shared file system knows locks; not tried",
    ),
    (
        "PostgreSQL",
        "no: a lock ends with its session (d)",
        "yes, when the connection ends (m, d)",
        "nothing is said; one queue for each GPU",
        "yes, a lock is a number (d)",
    ),
    (
        "simple-gpu-scheduler",
        "no: what waits is in its standard input (d)",
        "yes (m)",
        "in the order of its lines (m)",
        "no (d)",
    ),
    (
        "statistics only",
        "there is nothing to lose",
        "yes, when it no longer shows (m)",
        "none",
        "by asking each box",
    ),
)
