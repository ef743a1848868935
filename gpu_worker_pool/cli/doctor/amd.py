"""What `gpu-pool doctor` finds out about the AMD GPUs of this machine, beside what AMD's own tool shows."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_worker_pool.cli.units import count
from gpu_worker_pool.gpus.amd import AmdProbe
from gpu_worker_pool.gpus.probe import ProbeUnavailable

from .finding import Finding

_SMI_S = 20.0


def judge_amd(root: Path = Path("/")) -> Iterator[Finding]:
    """What the kernel shows, and whether amd-smi shows the same GPUs, by their PCI addresses."""
    try:
        probe = AmdProbe(socket.gethostname(), root=root)
    except ProbeUnavailable as unavailable:
        yield Finding("amdgpu", "skipped", str(unavailable))
        return
    readings, ours = probe.read(time.monotonic()).readings, probe.addresses
    if sick := [f"GPU {reading.gpu.index}: {reading.fault}" for reading in readings if reading.fault]:
        yield Finding("amdgpu", "problem", "; ".join(sick), "such a GPU is never granted; the others are")
    else:
        models = ", ".join(dict.fromkeys(reading.gpu.name for reading in readings))
        yield Finding("amdgpu", "ok", f"{count(len(readings), 'GPU')}: {models}")
    program = shutil.which("amd-smi")
    if program is None:
        return
    try:
        done = subprocess.run([program, "list", "--json"], capture_output=True, text=True, timeout=_SMI_S, check=False)  # noqa: S603 - the one of PATH
        theirs = frozenset(_addresses_in(json.loads(done.stdout)))
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        text = f"its answer cannot be read ({error})"
        yield Finding("amd-smi", "warning", text, "run amd-smi list by hand: it says more")
        return
    if ours - theirs:
        how = "the driver and its tools may be of different versions: update or reboot"
        yield Finding("amd-smi", "warning", f"it does not show {', '.join(sorted(ours - theirs))}", how)
    elif theirs - ours:
        left_out = ", ".join(sorted(theirs - ours))
        yield Finding("amd-smi", "ok", f"it also shows {left_out}: a part of the processor, which is not handed out")
    else:
        yield Finding("amd-smi", "ok", f"it shows the same {count(len(ours), 'GPU')}")


def _addresses_in(answer: Any) -> Iterator[str]:
    """The PCI addresses in an answer of amd-smi: ROCm 6 answers with a list of GPUs, ROCm 7 with such a list in an object."""
    if isinstance(answer, dict) and isinstance(answer.get("bdf"), str):
        yield answer["bdf"].lower()
    elif isinstance(answer, list | dict):
        for part in answer.values() if isinstance(answer, dict) else answer:
            yield from _addresses_in(part)
