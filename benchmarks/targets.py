"""The figures of the benchmarks, each with the target that it is held to. docs/why/benchmarks.md has a row for each.

A target bounds the ratio of ours to what it is measured beside, or our own value. A figure without a bound is shown for information.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["reached", "missed", ""]
RATIO = "x"


@dataclass(frozen=True)
class Target:
    """One figure. `unit` is that of the bound: `RATIO` bounds the ratio, any other unit our own value."""

    id: str
    part: str
    what: str
    at_most: float | None = None
    at_least: float | None = None
    unit: str = RATIO

    def verdict(self, value: float | None, ratio: float | None) -> Verdict:
        """Judge a figure. One that lacks what is bounded has no verdict: unknown is not zero."""
        judged = ratio if self.unit == RATIO else value
        if judged is None or (self.at_most is None and self.at_least is None):
            return ""
        is_low_enough = self.at_most is None or judged <= self.at_most
        is_high_enough = self.at_least is None or judged >= self.at_least
        return "reached" if is_low_enough and is_high_enough else "missed"


# A change may not make what users wait for more than this much slower than the base.
NOT_SLOWER = 1.25
# Five times as fast.
FAR_AHEAD = 0.2

TARGETS = (
    Target("lease_full", "beside", "lease + release over HTTP, one connection, full", NOT_SLOWER),
    Target("lease_normal", "beside", "lease + release over HTTP, one connection, normal", NOT_SLOWER),
    Target("lease_client", "beside", "lease + release by the blocking Python client, full", NOT_SLOWER),
    Target("server_cpu", "beside", "processor time of the server for a lease + release, full"),
    Target("hand_over", "beside", "release to the next waiter, blocking client", NOT_SLOWER),
    Target("killed", "beside", "`kill -9` of a holder to the next waiter, blocking client", NOT_SLOWER),
    Target("summary", "beside", "`GET /gpu/summary`, one connection"),
    Target("status_cpu", "beside", "`gpu-pool status`, processor time", 0.12, unit="s"),
    Target("run_cpu", "beside", "`gpu-pool run -- true`, processor time", 0.22, unit="s"),
    Target("bare_cpu", "beside", "`python -c pass`, processor time, for comparison"),
    Target("import", "beside", "import of the client, and making one, above a bare python", 0.060, unit="s"),
    Target("memory_server", "beside", "memory (PSS) of an idle server", 65.0, unit="MB"),
    Target("memory_client", "beside", "memory (PSS) of a program that holds a GPU", 25.0, unit="MB"),
    Target("decision_512", "beside", "slowest kind of decision, 512 GPUs, 1,000 waiters, mean", 0.001, unit="s"),
    Target("decision_10000", "beside", "slowest kind of decision, 10,000 GPUs, 10,000 waiters, mean", 0.025, unit="s"),
    Target("summary_bare", "serving", "`GET /gpu/summary` a second, 64 connections, log off", at_least=0.7),
    Target("hand_over_hyperqueue", "contenders", "release to the next waiter", FAR_AHEAD),
    Target("hand_over_slurm", "contenders", "release to the next waiter", FAR_AHEAD),
    Target("hand_over_ray", "contenders", "release to the next waiter", FAR_AHEAD),
    Target("hand_over_ray_reused", "contenders", "release to the next waiter"),
    Target("hand_over_dask", "contenders", "release to the next waiter"),
    Target("killed_hyperqueue", "contenders", "`kill -9` of a holder to the next waiter", FAR_AHEAD),
    Target("killed_slurm", "contenders", "`kill -9` of a holder to the next waiter", FAR_AHEAD),
    Target("killed_ray", "contenders", "`kill -9` of a holder to the next waiter", FAR_AHEAD),
    Target("killed_ray_reused", "contenders", "`kill -9` of a holder to the next waiter"),
    Target("cycle_ray_reused", "contenders", "request + release of one client"),
    Target("cycle_dask", "contenders", "request + release of one client", FAR_AHEAD),
    Target("crowd_ray_reused", "contenders", "64 clients on 8 GPUs: requests + releases a second", at_least=1.0),
    Target("batch_true", "sweep", "`batch` of 1,000 x `true` on 8 GPUs, jobs a second", at_least=1.0),
    Target("array_true", "sweep", "`submit --array` of 1,000 x `true` on 8 GPUs, jobs a second", at_least=1.0),
    Target("batch_50ms", "sweep", "`batch` of 1,000 jobs of 50 ms on 8 GPUs, jobs a second", at_least=1.0),
    Target("array_50ms", "sweep", "`submit --array` of 1,000 jobs of 50 ms on 8 GPUs, jobs a second", at_least=1.0),
    Target("batch_true_ts", "sweep", "`batch` of 1,000 x `true` on 8 GPUs, jobs a second"),
    Target("next_run_hyperqueue", "next_command", "end of a command to the start of the next, `gpu-pool run`", 1.0),
    Target("next_run_srun", "next_command", "end of a command to the start of the next, `gpu-pool run`", 1.0),
    Target("next_run_ts", "next_command", "end of a command to the start of the next, `gpu-pool run`"),
    Target("one_run_hyperqueue", "next_command", "`gpu-pool run -- true` alone, from the prompt and back to it"),
    Target("one_run_srun", "next_command", "`gpu-pool run -- true` alone, from the prompt and back to it"),
    Target("one_run_ts", "next_command", "`gpu-pool run -- true` alone, from the prompt and back to it"),
    Target("fleet_lease", "fleet", "lease + release through a box that does not lead", 2.7),
    Target("take_over", "fleet", "`kill -9` of the leader until a client has a GPU, the longest", 5.0, unit="s"),
    Target("take_over_ended", "fleet", "leases that ended by these deaths", 0.0, unit="leases"),
    Target("leader_cores", "fleet", "1,000 boxes, 8,000 GPUs: the leader in its busiest phase", 1.0, unit="cores"),
    Target("leader_hand_over", "fleet", "1,000 boxes, 8,000 GPUs: release to the next waiter, p99", 0.1, unit="s"),
    Target("allocation", "replay", "OpenB at 130 % demand: GPU capacity allocated", at_least=95.9, unit="%"),
    Target("wait_all", "replay", "OpenB in its own time on 48 GPUs: mean wait", 1_100.0, unit="s"),
    Target("wait_wide", "replay", "the same, requests for 5 and more GPUs: mean wait", 137_000.0, unit="s"),
)  # fmt: skip

BY_ID = {target.id: target for target in TARGETS}
