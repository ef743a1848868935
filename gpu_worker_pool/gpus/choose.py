"""The choice of a probe: simulated if configured, else NVML, else nvidia-smi."""

from __future__ import annotations

from collections.abc import Callable

from .nvidia_smi import NvidiaSmiProbe
from .nvml import NvmlProbe
from .probe import Probe, ProbeUnavailable
from .simulated import SimulatedProbe


def choose_probe(node: str, simulated_gpus: str | None) -> Probe:
    """The first probe that works here; ProbeUnavailable gives the reason for each that does not."""
    if simulated_gpus:
        return SimulatedProbe(node, simulated_gpus)
    reasons = []
    makers: tuple[Callable[[str], Probe], ...] = (NvmlProbe, NvidiaSmiProbe)
    for make in makers:
        try:
            return make(node)
        except ProbeUnavailable as unavailable:
            reasons.append(str(unavailable))
    raise ProbeUnavailable("; ".join(reasons))
