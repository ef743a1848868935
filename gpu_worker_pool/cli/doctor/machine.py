"""What `gpu-pool doctor` finds out about the GPUs of this machine."""

from __future__ import annotations

import os
import platform
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import gpu_worker_pool
from gpu_worker_pool.cli.units import count
from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.gpus.nvidia_smi import NvidiaSmiProbe
from gpu_worker_pool.gpus.nvml import NvmlProbe
from gpu_worker_pool.gpus.probe import Probe, ProbeUnavailable
from gpu_worker_pool.host.visible_devices import InstalledGpu, select_visible

from .finding import Check, Finding, TookTooLong, within

# A reading runs nvidia-smi twice, and stops it after this; NVML has no such bound of its own.
SMI_S = 10.0
NVML_S = 20.0
TRY_SIMULATED = "to try the pool without one: gpu-pool serve --simulated-gpus 4, or SIMULATED_GPUS=4"
CONTAINER = "in a container pass the GPUs in (docker run --gpus all)"


@dataclass(frozen=True, slots=True)
class Probed:
    """The result of one probe. `unavailable` says why the probe cannot be used. A driver without GPUs has no error."""

    readings: tuple[Reading, ...] = ()
    error: str | None = None
    unavailable: str | None = None
    took_s: float = 0.0

    @property
    def trouble(self) -> str:
        return self.unavailable or self.error or "it shows no GPU"


def probe_once(make_probe: Callable[[], Probe], limit_s: float) -> Probed:
    """Read once; a driver that hangs is a finding, not a reason to wait for ever."""

    def read_once() -> Probed:
        began = time.monotonic()
        try:
            probe = make_probe()
        except ProbeUnavailable as unavailable:
            return Probed(unavailable=str(unavailable))
        seen = probe.read(began)
        probe.close()
        return Probed(seen.readings, seen.error, took_s=time.monotonic() - began)

    try:
        return within(limit_s, read_once)
    except TookTooLong:
        return Probed(error=f"it has not answered for {limit_s:g} s: the NVIDIA driver hangs", took_s=limit_s)


class GpuFacts:
    """What is known of this machine's GPUs, each found out when it is first asked for."""

    @cached_property
    def driver(self) -> str | None:
        """The version of the NVIDIA driver that is loaded."""
        return driver_version(Path("/"))

    @cached_property
    def nvml(self) -> Probed:
        return probe_once(lambda: NvmlProbe(socket.gethostname()), NVML_S)

    @cached_property
    def smi(self) -> Probed:
        return probe_once(lambda: NvidiaSmiProbe(socket.gethostname(), timeout_s=SMI_S), 3 * SMI_S)

    @property
    def readings(self) -> tuple[Reading, ...]:
        """As a server would see them: by NVML, else by nvidia-smi."""
        return self.nvml.readings if self.nvml.unavailable is None else self.smi.readings


def driver_version(root: Path) -> str | None:
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found[0] if found else "unknown"


def checks(facts: GpuFacts) -> list[Check]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [
        Check("python", judge_python),
        Check("driver", lambda: judge_driver(facts.driver, facts.nvml, facts.smi)),
        Check("nvml", lambda: judge_nvml(facts.driver, facts.nvml, facts.smi)),
        Check("nvidia-smi", lambda: judge_smi(facts.driver, facts.nvml, facts.smi)),
        Check("visible-devices", lambda: judge_visible_devices(visible, facts.readings)),
    ]


def judge_python() -> Iterator[Finding]:
    text = f"gpu-worker-pool {gpu_worker_pool.__version__}, Python {platform.python_version()} on {platform.system()}"
    yield Finding("python", "ok", text)


def judge_driver(driver: str | None, nvml: Probed, smi: Probed) -> Iterator[Finding]:
    if driver is not None:
        yield Finding("driver", "ok", f"NVIDIA driver {driver}")
    elif nvml.readings or smi.readings:  # as in WSL, where Windows has the driver
        yield Finding("driver", "ok", "the GPUs can be read, though the system shows no NVIDIA driver")
    else:
        how = f"on a GPU box install the NVIDIA driver; {CONTAINER}; {TRY_SIMULATED}"
        yield Finding("driver", "warning", "no NVIDIA driver is loaded: this machine has no GPU to hand out", how)


def judge_nvml(driver: str | None, nvml: Probed, smi: Probed) -> Iterator[Finding]:
    """Whether the driver's library can be used, which is the fast way."""
    if sick := [f"GPU {reading.gpu.index}: {reading.fault}" for reading in nvml.readings if reading.fault]:
        yield Finding("nvml", "problem", "; ".join(sick), "such a GPU is never granted; the others are")
    elif nvml.readings:
        models = ", ".join(dict.fromkeys(reading.gpu.name for reading in nvml.readings))
        yield Finding(
            "nvml", "ok", f"{count(len(nvml.readings), 'GPU')}: {models}, read in {1000 * nvml.took_s:.0f} ms"
        )
    elif smi.readings:
        yield Finding("nvml", "warning", nvml.trouble, "fix it: until then the slower nvidia-smi is used")
    elif driver is None and nvml.unavailable is not None:
        yield Finding("nvml", "skipped", nvml.unavailable)
    else:
        how = f"compare with nvidia-smi below; {CONTAINER}; {TRY_SIMULATED}"
        yield Finding("nvml", "problem", nvml.trouble, how)


def judge_smi(driver: str | None, nvml: Probed, smi: Probed) -> Iterator[Finding]:
    """Whether nvidia-smi runs, and shows as many GPUs as NVML."""
    if smi.readings:
        shown = count(len(smi.readings), "GPU")
        # NVML shows MIG devices in place of their GPU, nvidia-smi shows the GPU.
        has_mig = any(reading.gpu.key.uuid.startswith("MIG-") for reading in nvml.readings)
        if nvml.readings and len(nvml.readings) != len(smi.readings) and not has_mig:
            how = "NVML counts; the driver and its tools may be of different versions: update or reboot"
            yield Finding("nvidia-smi", "warning", f"{shown}, but NVML shows {len(nvml.readings)}", how)
        else:
            yield Finding("nvidia-smi", "ok", f"{shown}, read in {1000 * smi.took_s:.0f} ms")
    elif nvml.readings and smi.unavailable is not None:
        yield Finding("nvidia-smi", "ok", f"not needed, because NVML works ({smi.unavailable.split(':')[0]})")
    elif driver is None and smi.unavailable is not None:
        yield Finding("nvidia-smi", "skipped", smi.unavailable)
    else:
        yield Finding("nvidia-smi", "problem", smi.trouble, "run nvidia-smi by hand: it says more")


def judge_visible_devices(value: str | None, readings: Sequence[Reading]) -> Iterator[Finding]:
    """CUDA_VISIBLE_DEVICES as a server that is started here would understand it."""
    name = "visible-devices"
    if value is None:
        yield Finding(name, "ok", "CUDA_VISIBLE_DEVICES is not set: all GPUs are shown")
        return
    shown = f"CUDA_VISIBLE_DEVICES={value[:60]!r}"
    visible = select_visible(value, [InstalledGpu(reading.gpu.index, reading.gpu.key.uuid) for reading in readings])
    if visible.is_filtering and not visible.indices:
        how = "a server that is started from here shows no GPU: unset it, or name the GPUs to show"
        yield Finding(name, "warning", f"{shown} hides all GPUs", how)
    elif not readings:
        yield Finding(name, "skipped", f"{shown}; there is no GPU that it could show or hide")
    elif visible.warnings:
        how = "correct it: CUDA itself hides what comes after a name that it does not know"
        yield Finding(name, "warning", "; ".join(visible.warnings), how)
    else:
        indices = ", ".join(map(str, visible.indices))
        yield Finding(name, "ok", f"{shown}: of {count(len(readings), 'GPU')} these are shown: {indices}")
