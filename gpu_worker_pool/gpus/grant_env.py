"""What the environment of a process must have, by the vendor of its GPUs, so that it sees these GPUs and no others.

The vendor is known by the UUID: NVIDIA's have hyphens in them, AMD's are the 16 digits of the GPU's unique id.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

DEVICE_ORDER: Final = "CUDA_DEVICE_ORDER"
VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
ROCM_DEVICES: Final = "ROCR_VISIBLE_DEVICES"
HIP_DEVICES: Final = "HIP_VISIBLE_DEVICES"
PCI_ORDER: Final = "PCI_BUS_ID"
# Of an AMD GPU without a unique id.
NAMED_BY_PLACE: Final = "GPU-pci-"
# Where a box has NVIDIA GPUs too, the indices of its AMD GPUs begin here: below those of MIG devices, and the same whatever
# NVIDIA GPUs are there.
FIRST_OF_MIXED: Final = 64
_MIG: Final = "MIG-"
_AMD: Final = re.compile(rf"GPU-[0-9a-f]{{16}}|{NAMED_BY_PLACE}.+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GrantedGpu:
    """A GPU of a grant. `index` is None while only its UUID is known."""

    index: int | None
    uuid: str


def is_amd(uuid: str) -> bool:
    return _AMD.fullmatch(uuid) is not None


def grant_env(gpus: Sequence[GrantedGpu], *, by_uuid: bool = False) -> dict[str, str]:
    """The variables for these GPUs. With `by_uuid`, CUDA is given UUIDs instead of indices; also where devices are refused on
    this machine, because CUDA counts only those that a process may open.
    """
    from gpu_worker_pool.host.enforcement import is_denying  # noqa: PLC0415 - it loads much, and an import of the client must not

    amd = [gpu for gpu in gpus if is_amd(gpu.uuid)]
    # CUDA does not know the UUID of an AMD GPU, so it shows none for it. An index could be that of an NVIDIA GPU.
    by_uuid = (
        by_uuid or bool(amd) or any(gpu.index is None or gpu.uuid.startswith(_MIG) for gpu in gpus) or is_denying()
    )
    in_order = sorted(gpus, key=lambda gpu: gpu.index or 0)
    env = {
        DEVICE_ORDER: PCI_ORDER,
        VISIBLE_DEVICES: ",".join(gpu.uuid if by_uuid else str(gpu.index) for gpu in in_order),
    }
    return env | rocm_env([gpu for gpu in in_order if gpu in amd])


def rocm_env(gpus: Sequence[GrantedGpu]) -> dict[str, str]:
    """The variables of ROCm for these AMD GPUs; none without one.

    ROCR_VISIBLE_DEVICES hides the others. HIP counts what that leaves visible, and would take CUDA_VISIBLE_DEVICES for its own
    if it were not told.
    """
    if not gpus:
        return {}
    names = [
        str((gpu.index or 0) % FIRST_OF_MIXED) if gpu.uuid.startswith(NAMED_BY_PLACE) else gpu.uuid for gpu in gpus
    ]
    return {ROCM_DEVICES: ",".join(names), HIP_DEVICES: ",".join(map(str, range(len(gpus))))}


def cdi_names(gpus: Sequence[GrantedGpu]) -> list[str]:
    """The names by which docker, podman and others know these GPUs (the Container Device Interface). The tool of NVIDIA names
    GPUs by UUID, that of AMD by number.
    """
    return [
        f"amd.com/gpu={(gpu.index or 0) % FIRST_OF_MIXED}" if is_amd(gpu.uuid) else f"nvidia.com/gpu={gpu.uuid}"
        for gpu in gpus
    ]
