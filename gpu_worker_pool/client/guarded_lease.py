"""The lease of a process under guard: what the process is told of it by its environment, and what its guard must know."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Final

from gpu_worker_pool.gpus.grant_env import GrantedGpu, cdi_names
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.host.enforcement import is_denying
from gpu_worker_pool.host.visible_devices import names_in
from gpu_worker_pool.models import Assignment
from gpu_worker_pool.notices import BEATS_PER_TTL

from .inherited_lease import (
    LEASE_ENDPOINT_VARIABLE,
    LEASE_FENCE_VARIABLE,
    LEASE_GPUS_VARIABLE,
    LEASE_ID_VARIABLE,
    LEASE_MEMORY_VARIABLE,
    LEASE_SCOPE_VARIABLE,
    LEASE_URL_VARIABLE,
    LEASE_UUIDS_VARIABLE,
    VISIBLE_DEVICES_VARIABLE,
)

# What docker and podman call the GPUs of the lease.
CDI_VARIABLE: Final = "GPU_POOL_CDI_DEVICES"
# A client gives up a lease one heartbeat before the server grants the GPU again. A process may take this part of that
# time to end; the rest is for the kernel, which takes its time to free the memory of a GPU.
_GRACE_PART: Final = 0.5


def command_env(environ: Mapping[str, str], assignment: Assignment) -> dict[str, str]:
    """`environ` with the variables that show the command its GPUs and no others, and that describe its lease."""
    env = dict(assignment.env)
    if VISIBLE_DEVICES_VARIABLE in env and is_denying():
        env[VISIBLE_DEVICES_VARIABLE] = ",".join(assignment.uuids)  # the leader of a fleet does not know how it is here
    indices = [int(str(gpu_id).rpartition(":")[2]) for gpu_id in assignment.gpu_ids]
    lease = {
        LEASE_ID_VARIABLE: assignment.lease_id or "",
        LEASE_URL_VARIABLE: assignment.server_url or "",
        LEASE_GPUS_VARIABLE: ",".join(map(str, assignment.gpu_ids)),
        LEASE_UUIDS_VARIABLE: ",".join(assignment.uuids),
        LEASE_MEMORY_VARIABLE: "" if assignment.memory_mb is None else str(assignment.memory_mb),
        LEASE_ENDPOINT_VARIABLE: assignment.endpoint_id or "",
        LEASE_FENCE_VARIABLE: "" if assignment.fence is None else str(assignment.fence),
        LEASE_SCOPE_VARIABLE: env.get(LEASE_SCOPE_VARIABLE, ""),
        CDI_VARIABLE: ",".join(cdi_names(list(map(GrantedGpu, indices, assignment.uuids)))),
    }
    return {**environ, **env, **lease}


def is_set_by_lease(environ: Mapping[str, str]) -> bool:
    """Whether CUDA_VISIBLE_DEVICES is as the lease around this process set it, and not as the user did since."""
    names, _ = names_in(environ.get(VISIBLE_DEVICES_VARIABLE, ""))
    own = {gpu_id.rpartition(":")[2] for gpu_id in environ.get(LEASE_GPUS_VARIABLE, "").split(",")}
    # A UUID is the lease's: a user inside a lease has nothing to take one from.
    return set(names) == own or not all(name.isdigit() for name in names)


def grace_after_loss(grace_s: float, ttl_s: float) -> float:
    """How long a process may take to end once its lease is lost: it is gone before the server grants the GPU again."""
    return min(grace_s, _GRACE_PART * ttl_s / BEATS_PER_TTL)


def limit_of(assignment: Assignment) -> float | None:
    """When the time limit ends the lease, on the clock of leases. The server may end it a little before."""
    return None if assignment.ends_at is None else on_lease_clock(assignment.ends_at)


def on_lease_clock(at: datetime) -> float:
    """A local time on the clock of leases."""
    return boot_time() + at.timestamp() - time.time()
