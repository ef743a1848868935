"""Whether a grant is what was asked for, and which of its variables may reach a command.

A program that answers on the endpoint need not be our server. So nothing of a grant reaches the environment of a process
but the two variables of CUDA, each in its form, and both must name the GPUs of the grant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpu_worker_pool.core.model.bounds import show_span
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey
from gpu_worker_pool.core.model.gpu_names import is_gpu_name
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.wire.bounds import MAX_TEXT, is_printable
from gpu_worker_pool.wire.leases import GangLeaseView, GpuRef
from gpu_worker_pool.wire.reader import has_all

DEVICE_ORDER: Final = "CUDA_DEVICE_ORDER"
VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
PCI_ORDER: Final = "PCI_BUS_ID"
# No GPU has such an index, MIG devices included.
_MAX_INDEX: Final = 1_000_000


class UnbelievableGrant(Exception):  # noqa: N818 - a verdict on the server
    """The server granted something other than what was asked for. The message says what."""


class NotReadYet(Exception):  # noqa: N818 - an event
    """A server that has just started has not read the index of a GPU yet; it is asked again."""


def check_grant(
    lease: GangLeaseView, data: Mapping[str, Any], request: Request
) -> tuple[tuple[Gpu, ...], dict[str, str], dict[str, dict[str, str]]]:
    """The GPUs of an active lease, and the environment that shows a process these and no others; for a lease on several
    nodes, that of each node, and the first one's is that of the lease. `data` is the body that `lease` was read from.
    """
    wishes = request.wishes
    if not has_all(lease, data, "gpus") or any(map(_is_odd, lease.gpus, data["gpus"])):
        raise UnbelievableGrant("it grants a GPU that cannot be read")
    if not lease.gpus or any(ref.gpu_id is None for ref in lease.gpus):
        raise NotReadYet("its answer grants no GPU that it can name")
    gpus = tuple(Gpu(GpuKey(ref.node or "", ref.uuid), ref.gpu_id or 0, ref.name or "") for ref in lease.gpus)
    if len(gpus) != wishes.total_gpus:
        raise UnbelievableGrant(f"it grants {len(gpus)} GPUs, and {wishes.total_gpus} were asked for")
    if len({gpu.key for gpu in gpus}) < len(gpus) or len({(gpu.key.node, gpu.index) for gpu in gpus}) < len(gpus):
        raise UnbelievableGrant("it grants the same GPU twice")
    fence = data.get("fence")
    # Nothing that compares fences could do so with another kind of value.
    if fence is not None and (lease.fence is None or lease.fence < 1 or isinstance(fence, bool)):
        raise UnbelievableGrant(f"its fence is {str(fence)[:20]!r}, which is not a whole number from 1 on")
    if wishes.among is not None:
        for gpu in gpus:
            if not any(_is_named(gpu, name) for name in wishes.among):
                raise UnbelievableGrant(f"it grants GPU {gpu.index}, which is not among those that were asked for")
    if request.time_limit_s is not None and (lease.ends_at is None or lease.granted_at is None):
        raise UnbelievableGrant(
            f"its lease does not end, and a limit of {show_span(request.time_limit_s)} was asked for"
        )
    if wishes.nodes == 1:
        return gpus, environment(lease.env, gpus), {}
    nodes = list(dict.fromkeys(gpu.key.node for gpu in gpus))
    parts = {part.node: part for part in lease.nodes}
    if len(nodes) != wishes.nodes or set(nodes) != set(parts):
        raise UnbelievableGrant(f"it grants GPUs on {len(nodes)} nodes, and {wishes.nodes} were asked for")
    by_node = {node: environment(parts[node].env, [gpu for gpu in gpus if gpu.key.node == node]) for node in nodes}
    return gpus, by_node[nodes[0]], by_node


def _is_odd(ref: GpuRef, data: Mapping[str, Any]) -> bool:
    texts = (ref.uuid, ref.node or "", ref.name or "")
    is_index = data.get("gpu_id") is None if ref.gpu_id is None else 0 <= ref.gpu_id < _MAX_INDEX
    return not ref.uuid or not is_index or not all(len(text) <= MAX_TEXT and is_printable(text) for text in texts)


def environment(env: Mapping[str, str], gpus: Sequence[Gpu]) -> dict[str, str]:
    """The variables of `env` that show a process these GPUs; UnbelievableGrant where they name others."""
    if env.get(DEVICE_ORDER, PCI_ORDER) != PCI_ORDER:
        raise UnbelievableGrant(f"its {DEVICE_ORDER} is not {PCI_ORDER}")
    visible = env.get(VISIBLE_DEVICES, "")
    names = visible.split(",")
    if not all(is_gpu_name(name) for name in names):
        raise UnbelievableGrant(f"its {VISIBLE_DEVICES} is missing or not a list of GPU indices and UUIDs")
    named = [next((gpu for gpu in gpus if _is_full_name(gpu, name)), None) for name in names]
    if None in named or len(names) != len(gpus) or len(set(named)) < len(gpus):
        raise UnbelievableGrant(f"its {VISIBLE_DEVICES} names other GPUs than it grants")
    # Every index here is one in the order of the bus, whether the server says so or not.
    return {DEVICE_ORDER: PCI_ORDER, VISIBLE_DEVICES: visible}


def _is_full_name(gpu: Gpu, name: str) -> bool:
    return name.lower() == gpu.key.uuid.lower() or name == str(gpu.index)


def _is_named(gpu: Gpu, name: str) -> bool:
    """Whether a name of `among` can mean this GPU; for beginnings of UUIDs, only the server knows whether it is unique."""
    return name == str(gpu.index) if name.isdigit() else gpu.key.uuid.lower().startswith(name.lower())
