"""What `gpu-pool doctor` finds out about the GPUs of this machine."""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
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

OLDEST_PYTHON = (3, 11)
# A reading runs nvidia-smi twice, and stops it after this; NVML has no such bound of its own.
SMI_S = 10.0
NVML_S = 20.0
SLOW_S = 2.0

TRY_SIMULATED = "to try the pool without one: gpu-pool serve --simulated-gpus 4, or SIMULATED_GPUS=4"
GET_A_DRIVER = (
    f"on a GPU box install the NVIDIA driver, in a container pass the GPUs in (docker run --gpus all); {TRY_SIMULATED}"
)


@dataclass(frozen=True, slots=True)
class NvidiaDriver:
    """What the system shows of the NVIDIA driver: its version where it is loaded, and its device files."""

    version: str | None
    devices: tuple[str, ...]

    @classmethod
    def here(cls, root: Path = Path("/")) -> NvidiaDriver:
        try:
            text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
            found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
            version = found[0] if found else "unknown"
        except OSError:
            version = None
        devices = sorted(path.name for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
        return cls(version, tuple(devices))


@dataclass(frozen=True, slots=True)
class Probed:
    """The result of one probe. `unavailable` says why the probe cannot be used. A driver without GPUs has no error."""

    readings: tuple[Reading, ...] = ()
    error: str | None = None
    unavailable: str | None = None
    took_s: float = 0.0

    @property
    def is_working(self) -> bool:
        return bool(self.readings)

    @property
    def count(self) -> str:
        return count(len(self.readings), "GPU")

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
    def driver(self) -> NvidiaDriver:
        return NvidiaDriver.here()

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


def checks(facts: GpuFacts) -> list[Check]:
    visible, order = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")
    return [
        Check("python", judge_python),
        Check("boot-clock", check_boot_clock),
        Check("driver", lambda: judge_driver(facts.driver, facts.nvml, facts.smi)),
        Check("nvml", lambda: judge_nvml(facts.driver, facts.nvml, facts.smi)),
        Check("nvidia-smi", lambda: judge_nvidia_smi(facts.driver, facts.nvml, facts.smi)),
        Check("visible-devices", lambda: judge_visible_devices(visible, facts.readings)),
        Check("device-order", lambda: judge_device_order(order, facts.readings)),
    ]


def judge_python(version: Sequence[int] = sys.version_info[:3]) -> Finding:
    text = f"gpu-worker-pool {gpu_worker_pool.__version__}, Python {'.'.join(map(str, version))} on {platform.system()}"
    if tuple(version[:2]) < OLDEST_PYTHON:
        return Finding("python", "problem", text, "Python 3.11 or newer is needed")
    return Finding("python", "ok", text)


def check_boot_clock() -> Finding:
    try:
        time.clock_gettime(time.CLOCK_BOOTTIME)
    except (AttributeError, OSError):
        text = "there is no CLOCK_BOOTTIME here: leases do not expire while the machine sleeps"
        return Finding("boot-clock", "warning", text, "do not let a machine that hands out GPUs go to sleep")
    return Finding("boot-clock", "ok", "leases run on a clock that cannot be set")


def judge_driver(driver: NvidiaDriver, nvml: Probed, smi: Probed) -> Finding:
    if driver.version is None:
        if nvml.is_working or smi.is_working:  # as in WSL, where Windows has the driver
            return Finding("driver", "ok", "the GPUs can be read, though the system shows no NVIDIA driver")
        text = "no NVIDIA driver is loaded: this machine has no GPU to hand out"
        return Finding("driver", "warning", text, GET_A_DRIVER)
    if not driver.devices and not nvml.is_working:
        text = f"the NVIDIA driver {driver.version} is loaded, but there is no /dev/nvidia0"
        how = "in a container pass the GPUs in (docker run --gpus all); else look for NVRM in the kernel's log (dmesg)"
        return Finding("driver", "problem", text, how)
    return Finding("driver", "ok", f"NVIDIA driver {driver.version}, {len(driver.devices)} device files")


def judge_nvml(driver: NvidiaDriver, nvml: Probed, smi: Probed) -> Finding:
    """Whether the driver's library can be used, which is the fast way."""
    sick = [f"GPU {reading.gpu.index}: {reading.fault}" for reading in nvml.readings if reading.fault]
    if sick:
        return Finding("nvml", "problem", "; ".join(sick), "such a GPU is never granted; the others are")
    if nvml.is_working:
        models = ", ".join(dict.fromkeys(reading.gpu.name for reading in nvml.readings))
        return Finding("nvml", "ok", f"{nvml.count}: {models}, read in {_ms(nvml.took_s)}")
    if smi.is_working:
        return Finding("nvml", "warning", nvml.trouble, "fix it: until then the slower nvidia-smi is used in its place")
    if driver.version is None and nvml.unavailable is not None:
        return Finding("nvml", "skipped", nvml.unavailable)
    return Finding("nvml", "problem", nvml.trouble, f"compare with nvidia-smi below; {TRY_SIMULATED}")


def judge_nvidia_smi(driver: NvidiaDriver, nvml: Probed, smi: Probed) -> Finding:
    """Whether nvidia-smi runs, how long it takes, and whether it shows what NVML shows."""
    if not smi.is_working:
        if nvml.is_working and smi.unavailable is not None:
            return Finding("nvidia-smi", "ok", f"not needed, because NVML works ({smi.unavailable.split(':')[0]})")
        if driver.version is None and smi.unavailable is not None:
            return Finding("nvidia-smi", "skipped", smi.unavailable)
        return Finding("nvidia-smi", "problem", smi.trouble, "run nvidia-smi by hand: it says more than we can")
    # NVML shows MIG devices in place of their GPU, nvidia-smi shows the GPU.
    has_mig = any(uuid.startswith("MIG-") for uuid in _uuids(nvml))
    if nvml.is_working and _uuids(nvml) != _uuids(smi) and not has_mig:
        text = f"it shows {smi.count}, NVML {nvml.count}, and not the same ones"
        how = "NVML is what counts; the driver and its tools may be of different versions: update or reboot"
        return Finding("nvidia-smi", "warning", text, how)
    text = f"{smi.count}, both queries in {_ms(smi.took_s)}"
    if smi.took_s > SLOW_S:
        how = "switch persistence mode on (nvidia-smi -pm 1, or the service nvidia-persistenced)"
        return Finding("nvidia-smi", "warning", f"{text}, which is slow", how)
    return Finding("nvidia-smi", "ok", text)


def judge_visible_devices(value: str | None, readings: Sequence[Reading]) -> Finding:
    """CUDA_VISIBLE_DEVICES as a server that is started here would understand it."""
    name = "visible-devices"
    if value is None:
        return Finding(name, "ok", "CUDA_VISIBLE_DEVICES is not set: all GPUs are shown")
    shown = f"CUDA_VISIBLE_DEVICES={value[:60]!r}"
    installed = [InstalledGpu(reading.gpu.index, reading.gpu.key.uuid) for reading in readings]
    visible = select_visible(value, installed)
    if visible.is_filtering and not visible.indices:
        advice = "a server that is started from here shows no GPU: unset it, or name the GPUs to show"
        return Finding(name, "warning", f"{shown} hides all GPUs", advice)
    if not installed:
        return Finding(name, "skipped", f"{shown}; there is no GPU that it could show or hide")
    if visible.warnings:
        advice = "correct it: CUDA itself hides what comes after a name that it does not know"
        return Finding(name, "warning", "; ".join(visible.warnings), advice)
    indices = ", ".join(map(str, visible.indices))
    return Finding(name, "ok", f"{shown}: of {count(len(readings), 'GPU')} these are shown: {indices}")


def judge_device_order(value: str | None, readings: Sequence[Reading]) -> Finding:
    name = "device-order"
    advice = "export CUDA_DEVICE_ORDER=PCI_BUS_ID; gpu-pool run and assignment.env do it by themselves"
    if value == "PCI_BUS_ID":
        return Finding(name, "ok", "CUDA_DEVICE_ORDER=PCI_BUS_ID: CUDA numbers the GPUs as nvidia-smi does")
    if value not in {None, "", "FASTEST_FIRST"}:
        return Finding(name, "warning", f"CUDA_DEVICE_ORDER={value!r} is nothing that CUDA knows", advice)
    if len({reading.gpu.name for reading in readings}) > 1:
        text = "the GPUs are of different models, and CUDA would number them otherwise than nvidia-smi and the pool do"
        return Finding(name, "warning", text, advice)
    return Finding(name, "ok", "CUDA_DEVICE_ORDER is not set, and need not be: there are no GPUs of different models")


def _uuids(probed: Probed) -> set[str]:
    return {reading.gpu.key.uuid for reading in probed.readings}


def _ms(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
