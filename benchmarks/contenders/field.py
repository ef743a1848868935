"""The contenders: how each is asked, what it says of itself, and how much of it is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from benchmarks.contenders import dask, hyperqueue, servers, slurm
from benchmarks.contenders.servers import REDIS_TTL_S, Serve
from benchmarks.contenders.takers import FILELOCK_SLEEP_S, FREE_PERCENT, LOOK_S, REDIS_SLEEP_S

# A holder's death shows when the lock's timeout ends, so it is measured with a timeout that is short enough to wait for.
SHORT_TTL_S = 2.0

# How quickly a contender can be measured: one that polls takes a while, one that is slow is measured rarely.
Pace: TypeAlias = Literal["fast", "looks", "slow"]

SERVERS: dict[str, Serve] = {
    "ours, full": servers.pool("full"),
    "ours, normal": servers.pool("normal"),
    "redis": servers.redis(is_durable=False),
    "redis, fsync": servers.redis(is_durable=True),
    "files": servers.files,
    "postgres": servers.postgres,
    "ray": servers.ray,
    "command": servers.command,
    "scheduler": servers.scheduler,
    "dask": dask.serve,
    "hyperqueue": hyperqueue.serve,
    "slurm": slurm.serve,
    "statistics": servers.statistics,
}


@dataclass(frozen=True)
class Contender:
    """One contender. `poll_s` is the interval at which it polls while it waits, `shows_s` the time until others see that a GPU is taken. A `slow` one starts a process for each grant, or shows it late."""

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
    # What it promises about the order in which waiters are served.
    order: str = "none stated"
    # The share of the time for which a crowd uses it: all of the time if it claims to exclude others.
    crowd_share: float = 1.0
    claims_exclusion: bool = True
    shows_s: float = 0.0
    # Without a queue nothing is handed over: what is measured instead is how soon the holder runs.
    has_queue: bool = True
    # How long many clients run at least before they are counted, where it first starts processes for them.
    warm_up_s: float = 0.0
    # Fewer rounds where it is slow, and one long round of many clients where it starts a waiting job seconds later.
    most_rounds: int = 100
    round_s: float | None = None
    # Why some of its parts are not measured.
    left_out: str = ""


PROCESS = "a process each"
COMMAND = "the command alone, without a scheduler"
A_PROCESS_EACH = "each grant starts a process, so many clients would measure this machine's processors"
FIELD = (
    Contender("ours, full", "pool", "ours, full", PROCESS, order="first come, first served"),
    Contender(
        "ours, normal", "pool", "ours, normal", PROCESS, rates=(1, 8), has_reclaim=False, crowd_share=0,
        left_out="it decides like `ours, full` and differs only in when it answers; see `leases` for many clients",
    ),
    Contender(
        "Redis lock", "redis-lock", "redis", PROCESS, REDIS_SLEEP_S, "looks", has_reclaim=False,
        left_out=f"the GPU stays locked until its timeout ends; it is measured with {SHORT_TTL_S:g} s",
    ),
    Contender(
        "Redis lock, fsync", "redis-lock", "redis, fsync", PROCESS, REDIS_SLEEP_S, rates=(1, 8),
        has_hand_over=False, has_reclaim=False, crowd_share=0,
        left_out="it is the same lock, and differs only in when Redis answers",
    ),
    Contender(
        f"Redis lock, timeout={SHORT_TTL_S:g} s", "redis-lock", "redis", PROCESS, REDIS_SLEEP_S,
        settings={"ttl_s": SHORT_TTL_S}, rates=(), has_hand_over=False, crowd_share=0, pace="slow", most_rounds=3,
        left_out="it differs from the other Redis lock only when a holder dies",
    ),
    Contender("Redis list", "redis-list", "redis", PROCESS, order="the longest waiter is next"),
    Contender("filelock", "filelock", "files", PROCESS, FILELOCK_SLEEP_S, "looks"),
    Contender("PostgreSQL", "postgres", "postgres", PROCESS),
    Contender(
        "Ray task", "ray-task", "ray", "a thread of one driver each", pace="slow", rates=(1,), crowd_share=0, most_rounds=3,
        left_out=f"{A_PROCESS_EACH}; it is measured with max_calls=0",
    ),
    Contender("Ray task, max_calls=0", "ray-task-reused", "ray", "a thread of one driver each", warm_up_s=6.0),
    Contender(
        "Ray actor", "ray-actor", "ray", "one driver", pace="slow", rates=(1,), crowd_share=0, most_rounds=3, left_out=A_PROCESS_EACH
    ),
    Contender(
        COMMAND, "command", "command", PROCESS, pace="looks", rates=(1,), crowd_share=0, has_queue=False, most_rounds=3,
        left_out="it shows how long the command of the schedulers of jobs takes to start, and has no queue",
    ),
    Contender(
        "simple-gpu-scheduler", "scheduler", "scheduler", PROCESS, pace="slow", rates=(1, 8),
        order="the order of the input lines", left_out=A_PROCESS_EACH,
    ),
    Contender(
        "Dask", "dask", "dask", "a thread of one driver each", most_rounds=3, has_reclaim=False,
        order="first in, first out, by priority", left_out="a task whose worker was killed is run again, and takes the GPU again",
    ),
    Contender("HyperQueue", "hyperqueue", "hyperqueue", PROCESS, pace="slow", most_rounds=3, order="by priority"),
    Contender(
        "Slurm, srun", "slurm-srun", "slurm", PROCESS, pace="slow", rates=(1, 64), most_rounds=3, round_s=5.0,
        order="first come, first served, by priority", left_out="with its default settings, it starts a waiting job seconds later",
    ),
    Contender(
        "Slurm, sbatch", "slurm-sbatch", "slurm", PROCESS, pace="slow", rates=(1,), has_hand_over=False, has_reclaim=False,
        crowd_share=0, most_rounds=2, left_out="it has the same queue as srun, and differs only in when a job is started",
    ),
    Contender(
        "statistics only", "statistics", "statistics", PROCESS, LOOK_S, "slow", claims_exclusion=False, shows_s=0.4,
        rates=(1,), crowd_share=0.1, left_out="it only reads the statistics; see `serving` for many readers",
    ),
)  # fmt: skip

IN_TURN = "The client tries each GPU's lock in turn, from a random one on"
HOW = {
    "ours": (
        "This project's blocking Python client, over HTTP to a server in a process of its own with simulated GPUs. At full, a grant "
        "is on the disk before it is answered; at normal, it may reach the disk soon after. Its access log, which is on by default, is off; "
        "`leases` shows what it costs."
    ),
    "Ray": (
        "One node, without its dashboard, in a network namespace of its own because it listens on all addresses. A task or "
        "an actor with num_gpus=1. Ray starts a new process for each task that needs a GPU, unless max_calls=0."
    ),
    "Redis lock": (
        f"redis-py's lock, with timeout={REDIS_TTL_S:g} s. {IN_TURN}; if all are taken, it tries again after "
        f"{REDIS_SLEEP_S:g} s, the library's default. Redis with its default settings takes a snapshot now and then; with fsync "
        "(appendfsync always), each change is on the disk before it is answered. (In `leases`, the Redis without fsync takes no "
        "snapshots either.) redis-py uses hiredis if the list of the peers has it."
    ),
    "Redis list": "A list of the free GPUs. The client takes one with BLPOP and returns it with RPUSH. The same Redis, with its default settings.",
    "filelock": f"A file for each GPU. {IN_TURN}; if all are taken, it tries again after {FILELOCK_SLEEP_S:g} s, the library's default.",
    "PostgreSQL": (
        f"A session's advisory locks, which are in memory. {IN_TURN} (pg_try_advisory_lock); if all are taken, it waits for "
        "a random one (pg_advisory_lock). Its default settings, except for the number of connections."
    ),
    COMMAND: (
        "The client itself starts the command of simple-gpu-scheduler, HyperQueue and Slurm, a small Python program without its site "
        "packages. What they take beyond that is theirs."
    ),
    "simple-gpu-scheduler": (
        "It reads commands from its standard input. Here that is a named pipe, so that several processes can ask it. A "
        "command is a small Python program that reports when it runs, and ends when it is told to."
    ),
    "Dask": (
        "A `LocalCluster` with a scheduler, and a worker process for each GPU with one unit of the resource GPU. A task asks for one "
        "unit. Dask starts a worker again when it dies. While others are measured it is stopped, because its idle workers use the processor. After each pause it first runs a task that is not timed."
    ),
    "HyperQueue": (
        "A `LocalCluster` of its wheel, which is a server and a worker in one process, in a network namespace of its own because it "
        "listens on all addresses. The wheel has no `hq` program, and its worker takes a number of cores and no other resource, "
        "so a core stands for a GPU. A client submits a job of one task by the Python API. The task is a small Python program "
        "that reports when it runs, and ends when it is told to."
    ),
    "Slurm": (
        "munged, slurmctld and slurmd of Debian's slurm-wlm, in a network namespace of their own because they listen on all addresses. "
        "Generic resources of the name gpu, with device files that behave like /dev/null. Its default settings, except for "
        "what one machine without cgroups needs. Other settings, such as a batch_sched_delay below 3 s, may start waiting jobs sooner. A client calls srun or sbatch with --gres=gpu:1. The job is the same small Python program."
    ),
    "statistics only": (
        f"The client takes the GPU that /gpu/summary shows as the least used, if its use is below {FREE_PERCENT:g} %; otherwise "
        f"it reads again after {LOOK_S:g} s. A taken GPU shows at the next reading, for as long as the process lives. The server "
        "reads the GPUs ten times a second."
    ),
}
