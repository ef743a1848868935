"""The figures with a target, in the order in which the document shows them."""

from __future__ import annotations

from typing import NamedTuple

# The row of the machine's table with how long a reading takes.
READING, READING_GPUS = "a reading of 8 simulated GPUs", 8


class Known(NamedTuple):
    """What a figure is, and its target, for a run that has not measured it."""

    what: str
    target: str


# The targets of the design.
OF_DESIGN = {
    "statistics_vs_bare": Known("`GET /gpu/summary`, relative to a bare ASGI handler", ">= 80 %"),
    "statistics_logged_vs_bare": Known(
        "the same with our access log on, relative to a bare handler without one", ">= 70 %"
    ),
    "statistics_while_probe_hangs": Known(
        "p99 of a GET while `nvidia-smi` takes 2 s, relative to while not", "<= 1.25 x"
    ),
    "lease_fsync_vs_redis_fsync": Known(
        "lease + release at `full`, relative to the Redis lock with fsync", "<= 1.6 x, also when it is quiet"
    ),
    "lease_vs_redis": Known(
        "lease + release at `normal`, relative to the Redis lock", "<= 3.5 x, also when it is quiet"
    ),
    "lease_client_vs_redis_fsync": Known(
        "lease + release at `full` by the blocking Python client, relative to the Redis lock with fsync", "<= 2.5 x"
    ),
    "crowd_vs_redis": Known("64 client processes on 8 GPUs, relative to the Redis lock", ">= 0.5 x"),
    "crowd_vs_ray": Known("the same, relative to Ray", ">= 1.5 x"),
    "hand_over_vs_blpop": Known("release to the next waiter, relative to `BLPOP` of Redis", "<= 5 x"),
    "hand_over_vs_ray": Known("the same, relative to Ray", "< 1 x"),
    "reclaim_vs_postgres": Known(
        "`kill -9` of a holder to the next waiter, relative to PostgreSQL's advisory lock", "<= 1.2 x"
    ),
    "decision_512_gpus": Known("the slowest kind of decision, 512 GPUs, 1,000 waiters", "<= 1 ms"),
    "decision_10000_gpus": Known("the slowest kind of decision, 10,000 GPUs, 10,000 waiters", "<= 25 ms"),
    "metrics_turn": Known("`/metrics` with 1,024 GPUs: the longest turn of the event loop", "<= 5 ms"),
    "pages_p99": Known("p99 of a lease + release with 50 open pages, relative to none", "<= 1.3 x"),
    "endpoints_first_gpu": Known("a client with 100 endpoints, some dead: time to the first GPU", "<= 0.3 s"),
    "run_with_silent_box": Known("`gpu-pool run` with one silent box of three, relative to without it", "<= 1.2 x"),
    "leader_lost": Known("a fleet that lost its leader: time until it grants again", "at most 5 s"),
    "fleet_leader_lost": Known("the same with many boxes, beside Ray with as many nodes", "at most 5 s"),
    "lease_in_fleet": Known(
        "lease + release through a box of a fleet that does not lead, relative to one box", "<= 3 times"
    ),
    "busy_leader": Known("processor share of the leader of 1,000 boxes while GPUs change hands", "<= 100 % of a core"),
    "fleet_hand_over_p99": Known("release to the next waiter in that fleet, p99", "<= 100 ms"),
    "import_time": Known("import of the client", "<= 60 ms"),
    "memory_server": Known("memory of an idle server", "<= 45 MB"),
    "memory_leader": Known("memory of a leader with 10,000 GPUs, leases and waiters", "<= 400 MB"),
    "memory_client": Known("memory of a client that holds a GPU", "<= 25 MB"),
    "replay_allocated": Known(
        "GPU capacity allocated at 130 % demand, of a real trace, minus the best other one",
        ">= -0.05 percentage points",
    ),
    "replay_wait": Known("mean wait of all requests, of that trace on few GPUs", "<= 1,100 s"),
    "replay_wait_wide": Known("mean wait of requests for 5 and more GPUs, of that trace on few GPUs", "<= 137,000 s"),
    "replay_synthetic_wide": Known("mean wait for 8 GPUs with a synthetic load", "<= 3,500 s"),
}
# Bounds that the benchmarks have set for themselves.
OWN = {
    "lease_socket_vs_tcp": Known("lease + release over the Unix socket, relative to TCP", "<= 1.05 x"),
    "full_vs_normal_64_gpus": Known("64 clients: the rate at `full`, relative to `normal`", ">= 70 %"),
    "full_vs_normal_8_gpus": Known("the same with 8 GPUs", ">= 70 %"),
    "longest_turn": Known("the longest turn of the event loop with many tiny shares", "<= 50 ms"),
    "idle_leader": Known("processor share of the leader of 1,000 boxes while nothing happens", "<= 33 % of a core"),
    "leader_turn": Known("the longest turn of the event loop of that leader", "<= 50 ms"),
    "import_weight": Known("what the client imports that only a server needs", "0"),
    "slow_readers": Known("memory of a server whose readers do not read, relative to none", "<= 1.5 x"),
}
FIGURES = {**OF_DESIGN, **OWN}
