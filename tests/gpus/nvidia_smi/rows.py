"""A row as `nvidia-smi` prints it, and whether a process that it started has ended."""

from __future__ import annotations

import os
import select

A, B, C = (f"GPU-{letter * 8}-1111-2222-3333-444444444444" for letter in "abc")
ROW_A = f"0, {A}, NVIDIA GeForce RTX 3080, 10240, 2048, 15, 45, 120.50, 320.00\n"
PATIENCE_S = 30.0


def ended(pid: int) -> bool:
    """Whether the process is over, be it that nobody has waited for it; waits for its end, not for a time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 5.0)[0])
    finally:
        os.close(descriptor)
