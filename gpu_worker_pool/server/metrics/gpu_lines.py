"""The metrics of each GPU of the pool, as text for Prometheus. A fleet may have ten thousand GPUs, so it is made in short turns."""

from __future__ import annotations

from gpu_worker_pool.core.model.slot import memory_use
from gpu_worker_pool.server.authority.pool import Pool
from gpu_worker_pool.server.calls.pool_view import STATES, gpu_states
from gpu_worker_pool.server.http.loop_share import LoopShare

MB = 1024 * 1024
STATE, OUTSIDE = "gpupool_gpu_state", "gpupool_gpu_memory_outside_bytes"


async def encode_gpu_lines(pool: Pool) -> bytes:
    """A sample of each state for each GPU, so that a sum counts GPUs, and a state that a GPU has left goes to 0; and the
    memory that belongs to no lease.
    """
    states = [_head(STATE, "1 for the state the GPU is in, as in /pool; 0 for the others.")]
    outside = [_head(OUTSIDE, "Memory in use that belongs to no lease.")]
    share = LoopShare()
    for slot, state_now in gpu_states(pool):
        node, uuid = _escaped(slot.key.node), _escaped(slot.key.uuid)
        # A GPU that has not been read since the start has no index.
        index = str(slot.reading.gpu.index) if slot.reading else ""
        labels = f'gpu="{index}",node="{node}"'
        lines = [f'{STATE}{{{labels},state="{state}",uuid="{uuid}"}} {float(state == state_now)}\n' for state in STATES]
        states.append("".join(lines).encode())
        use = memory_use(slot, pool.state.ignored_processes)
        if use is not None and slot.reading is not None:
            outside.append(f'{OUTSIDE}{{{labels},uuid="{uuid}"}} {float(use.outside_mb * MB)}\n'.encode())
        await share.yield_if_due()
    return b"".join((*states, *outside))


def _head(name: str, text: str) -> bytes:
    return f"# HELP {name} {text}\n# TYPE {name} gauge\n".encode()


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
