"""The choice of a probe: simulated if configured, else those of NVIDIA (NVML, else nvidia-smi) and of AMD."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from gpu_worker_pool.core.model.gpu import Reading

from .amd import AmdProbe
from .grant_env import FIRST_OF_MIXED
from .nvidia_smi import NvidiaSmiProbe
from .nvml import NvmlProbe
from .probe import Probe, ProbeResult, ProbeUnavailable
from .simulated import SimulatedProbe


def choose_probe(node: str, simulated_gpus: str | None) -> Probe:
    """The probe for the GPUs of this machine; ProbeUnavailable gives the reason for each that does not work here."""
    if simulated_gpus:
        return SimulatedProbe(node, simulated_gpus)
    reasons: list[str] = []
    nvidia = _first((lambda: NvmlProbe(node), lambda: NvidiaSmiProbe(node)), reasons)
    amd = _first((lambda: AmdProbe(node, first_index=FIRST_OF_MIXED if nvidia else 0),), reasons)
    if nvidia and amd:
        return MixedProbe(nvidia, amd)
    if probe := nvidia or amd:
        return probe
    raise ProbeUnavailable("; ".join(reasons))


class MixedProbe(Probe):
    """The GPUs of a box that has some of NVIDIA and some of AMD. Where one driver is away, its last readings stay, and their
    age grows; the other's GPUs are read.
    """

    def __init__(self, *probes: Probe) -> None:
        self._probes = probes
        self._last: list[tuple[Reading, ...]] = [() for _ in probes]
        self.source = "+".join(probe.source for probe in probes)

    def read(self, at: float) -> ProbeResult:
        errors = []
        for number, probe in enumerate(self._probes):
            result = probe.read(at)
            if result.error is not None:
                errors.append(result.error)
            if result.error is None or result.readings:
                self._last[number] = result.readings
        return ProbeResult(tuple(chain.from_iterable(self._last)), "; ".join(errors) or None)

    def close(self) -> None:
        for probe in self._probes:
            probe.close()


def _first(makers: Sequence[Callable[[], Probe]], reasons: list[str]) -> Probe | None:
    for make in makers:
        try:
            return make()
        except ProbeUnavailable as unavailable:
            reasons.append(str(unavailable))
    return None
