"""What a command is told of its lease, by its environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpu_worker_pool.client.inherited_lease import LEASE_ID_VARIABLE, LEASE_URL_VARIABLE
from gpu_worker_pool.client.pool_client import Assignment

VISIBLE_DEVICES_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
LEASE_GPUS_VARIABLE: Final = "GPU_POOL_LEASE_GPUS"


def command_env(environ: Mapping[str, str], assignment: Assignment) -> dict[str, str]:
    """`environ` with the variables that show the command its GPUs and no others, and that describe its lease."""
    lease = {
        LEASE_ID_VARIABLE: assignment.lease_id or "",
        LEASE_URL_VARIABLE: assignment.server_url or "",
        LEASE_GPUS_VARIABLE: ",".join(map(str, assignment.gpu_ids)),
        "GPU_POOL_LEASE_ENDPOINT": assignment.endpoint_id or "",
        "GPU_POOL_LEASE_FENCE": "" if assignment.fence is None else str(assignment.fence),
    }
    return {**environ, **assignment.env, **lease}
