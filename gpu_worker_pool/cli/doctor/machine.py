"""What `gpu-pool doctor` finds out about the GPUs of this machine."""

from __future__ import annotations

import platform
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import gpu_worker_pool
from gpu_worker_pool.cli.units import count
from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.enforce.devices import driver_parameters
from gpu_worker_pool.enforce.enforcer import ADVICE_ON_RESETS
from gpu_worker_pool.enforce.plan import resets_devices
from gpu_worker_pool.gpus.amd import AmdProbe
from gpu_worker_pool.gpus.choose import choose_probe
from gpu_worker_pool.gpus.probe import ProbeUnavailable
from gpu_worker_pool.host.enforcement import DENY, Enforcement, read_enforcement

from .command import Check, Finding

TRY_SIMULATED = "to try the pool without one: gpu-pool serve --simulated-gpus 4, or SIMULATED_GPUS=4"
_SMI_S = 20.0
CONTAINER = "in a container pass the GPUs in (docker run --gpus all)"


@dataclass(frozen=True, slots=True)
class Probed:
    """What the server's own probe reads here; `error` says why nothing can be read, or not all of it."""

    readings: tuple[Reading, ...] = ()
    source: str = ""
    error: str | None = None
    took_s: float = 0.0


def probe() -> Probed:
    """Read as a server would."""
    began = time.monotonic()
    try:
        reader = choose_probe(socket.gethostname(), None)
    except ProbeUnavailable as unavailable:
        return Probed(error=str(unavailable))
    seen = reader.read(began)
    reader.close()
    return Probed(seen.readings, reader.source, seen.error, time.monotonic() - began)


def driver_version(root: Path) -> str | None:
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found[0] if found else "unknown"


def checks() -> list[Check]:
    python = f"Python {platform.python_version()} on {platform.system()}"
    return [
        Check("python", lambda: [Finding("python", "ok", f"gpu-worker-pool {gpu_worker_pool.__version__}, {python}")]),
        Check("gpus", lambda: judge_gpus(driver_version(Path("/")), probe())),
        Check("amd-smi", judge_amd),
        Check("enforce", lambda: judge_enforcement(read_enforcement(), driver_parameters())),
    ]


def judge_gpus(driver: str | None, probed: Probed) -> Iterator[Finding]:
    """Whether a server that is started here can read the GPUs, and how."""
    if sick := [f"GPU {reading.gpu.index}: {reading.fault}" for reading in probed.readings if reading.fault]:
        yield Finding("gpus", "problem", "; ".join(sick), "this GPU is never granted; the others are")
    elif probed.readings:
        models = ", ".join(dict.fromkeys(reading.gpu.name for reading in probed.readings))
        by = f"{probed.source}{f', driver {driver}' if driver else ''}"
        text = f"{count(len(probed.readings), 'GPU')}: {models} (by {by}), read in {1000 * probed.took_s:.0f} ms"
        if probed.source.startswith("nvidia-smi"):
            how = "nvidia-smi is slow: find out why NVML, libnvidia-ml.so.1, cannot be loaded"
            yield Finding("gpus", "warning", text, how)
        else:
            yield Finding("gpus", "ok", text)
    elif driver is None:
        text = f"this machine has no GPU to hand out: no driver of NVIDIA or AMD is loaded ({probed.error or 'it shows no GPU'})"
        how = f"on a GPU box install the driver of its GPUs; {CONTAINER}; {TRY_SIMULATED}"
        yield Finding("gpus", "warning", text, how)
    else:
        how = f"run nvidia-smi by hand: it says more; {CONTAINER}; {TRY_SIMULATED}"
        yield Finding("gpus", "problem", f"driver {driver}: {probed.error or 'it shows no GPU'}", how)


def judge_enforcement(found: Enforcement | None, parameters: Mapping[str, str]) -> Iterator[Finding]:
    """Whether only holders can open a GPU here, and whether the driver would undo that."""
    if found is None:
        text = "every user can open every GPU; `gpu-pool enforce` lets only its holders (docs/how-to/enforce.md)"
        yield Finding("enforce", "skipped", text)
        return
    text = f"mode {found.mode}, {count(len(found.devices), 'device')}"
    if not found.is_running:
        how = "start it again (gpu-pool enforce), or give the devices back to all (gpu-pool enforce --stop)"
        yield Finding("enforce", "problem", f"{text}; it does not run, and the devices stay as they were", how)
    elif found.mode == DENY and parameters and resets_devices(parameters):
        yield Finding("enforce", "warning", f"{text}; the NVIDIA driver undoes it", ADVICE_ON_RESETS)
    else:
        yield Finding("enforce", "ok", f"{text}, pid {found.pid}")


def judge_amd(root: Path = Path("/")) -> Iterator[Finding]:
    """Whether amd-smi, where there is one, shows the GPUs that the kernel shows, by their PCI addresses."""
    program = shutil.which("amd-smi")
    try:
        ours = AmdProbe(socket.gethostname(), root=root).addresses if program else frozenset()
        command = [program or "", "list", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=False)  # noqa: S603 - of PATH
    except (OSError, ProbeUnavailable, subprocess.TimeoutExpired):
        return
    # A list of GPUs in ROCm 6, such a list in an object in ROCm 7.
    theirs = frozenset(found.lower() for found in re.findall(r'"bdf": *"([^"]+)"', done.stdout))
    if ours - theirs:
        how = "the driver and its tools may be of different versions: update or reboot"
        yield Finding("amd-smi", "warning", f"it does not show {', '.join(sorted(ours - theirs))}", how)
    elif theirs - ours:
        left_out = ", ".join(sorted(theirs - ours))
        yield Finding("amd-smi", "ok", f"it also shows {left_out}: a part of the processor, which is not handed out")
    else:
        yield Finding("amd-smi", "ok", f"it shows the same {count(len(ours), 'GPU')}")
