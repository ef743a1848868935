"""Whether a command ended because there was no memory left: that of a GPU, by what it wrote last, or the machine's, by the kernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from gpu_worker_pool.wire.reader import plain

# How much of the end of a log is looked at, and how much of the sentence is shown.
_TAIL_BYTES: Final = 16 << 10
_MOST_TEXT: Final = 120
_VMSTAT: Final = Path("/proc/vmstat")
# In the words of PyTorch (CUDA and HIP), JAX and XLA, TensorFlow, CuPy, and the runtimes themselves.
_OF_GPU: Final = re.compile(
    rb"(?:CUDA|HIP) out of memory[^\n]*|OutOfMemoryError[^\n]*|RESOURCE_EXHAUSTED: [^\n]*|(?:CUDA|HIP)_ERROR_OUT_OF_MEMORY"
    rb"|(?:cuda|hip)ErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED|ResourceExhaustedError[^\n]*"
    rb"|OOM when allocating[^\n]*"
)
_OF_MACHINE: Final = re.compile(rb"^MemoryError\b[^\n]*|std::bad_alloc|[Cc]annot allocate memory", re.MULTILINE)
# As a shell has it: SIGKILL.
_KILLED: Final = 137


def cause_in_text(tail: bytes) -> str | None:
    """`out of memory on the GPU: CUDA out of memory. Tried to allocate 2.00 GiB`; None where it says nothing of memory."""
    for pattern, where in ((_OF_GPU, " on the GPU"), (_OF_MACHINE, "")):
        if found := pattern.findall(tail):
            said = plain(found[-1].decode(errors="replace").strip())
            return f"out of memory{where}: {said[:_MOST_TEXT]}"
    return None


def cause_in_log(path: Path) -> str | None:
    """The same of the end of a log, or of the file that it was before it became too long."""
    for name in (path, path.with_name(f"{path.name}.old")):
        try:
            with name.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(size - _TAIL_BYTES, 0))
                if (cause := cause_in_text(file.read())) is not None:
                    return cause
        except OSError:
            continue
    return None


def kernel_kills(vmstat: Path = _VMSTAT) -> int | None:
    """How many processes the kernel has killed since its start because there was no memory left; None where it does not say."""
    try:
        found = re.search(r"^oom_kill (\d+)$", vmstat.read_text(encoding="ascii"), re.MULTILINE)
    except (OSError, ValueError):
        return None
    return int(found[1]) if found else None


def cause_by_kernel(exit_code: int, before: int | None, after: int | None) -> str | None:
    """Whether the kernel has killed the command: it died of SIGKILL, and the kernel killed something meanwhile."""
    if exit_code != _KILLED or before is None or after is None or after <= before:
        return None
    return "out of memory: the kernel's OOM killer ended it"
