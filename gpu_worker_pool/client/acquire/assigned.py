"""The assignment that the user gets for a grant."""

from __future__ import annotations

from datetime import datetime

from gpu_worker_pool.models import GlobalGPUAssignment, GPUAssignment

from .acquisition import Won
from .lost import Lost
from .warned import Warned


def make_assignment(
    won: Won, worker_id: str, lost: Lost, warned: Warned, *, is_multi: bool
) -> GPUAssignment | GlobalGPUAssignment:
    indices = tuple(gpu.index for gpu in won.grant.gpus)
    # In a fleet the GPU may be in another box than the one that was asked.
    global_ids = tuple(f"{won.place.name_of(gpu.key.node)}:{gpu.index}" for gpu in won.grant.gpus)
    endpoint_id = won.place.name_of(won.grant.gpus[0].key.node)
    where = {"global_gpu_id": global_ids[0], "endpoint_id": endpoint_id}
    now = datetime.now()  # noqa: DTZ005 - local time, as all times of the documents
    assignment: GPUAssignment | GlobalGPUAssignment
    if is_multi:
        assignment = GlobalGPUAssignment(**where, local_gpu_id=indices[0], worker_id=worker_id, assigned_at=now)
        assignment.gpu_ids = global_ids
    else:
        assignment = GPUAssignment(indices[0], worker_id, now, **where, local_gpu_id=indices[0])
        assignment.gpu_ids = indices
    assignment.lease_id, assignment.fence = won.lease_id, won.grant.fence
    assignment.server_url = won.place.member.endpoint.url.url if won.book.needs_heartbeat else None
    assignment.uuids = tuple(gpu.key.uuid for gpu in won.grant.gpus)
    assignment.nodes = tuple(gpu.key.node for gpu in won.grant.gpus)
    assignment.env, assignment.lost, assignment.warned = dict(won.grant.env), lost, warned
    assignment.ends_at, assignment.node_envs = won.grant.ends_at, dict(won.grant.node_envs)
    return assignment
