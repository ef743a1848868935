"""What is known of CUDA in this process without loading it."""

from __future__ import annotations

from pathlib import Path


def has_initialized_cuda() -> bool:
    """Whether this process has the device open that CUDA, of any framework, opens when it is initialized."""
    for descriptor in Path("/proc/self/fd").glob("*"):
        try:
            if descriptor.readlink().name == "nvidia-uvm":
                return True
        except OSError:
            continue  # closed meanwhile
    return False
