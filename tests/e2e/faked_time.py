"""A server under libfaketime, so that its wall clock jumps while all other clocks go on.

FAKETIME_DONT_FAKE_MONOTONIC leaves CLOCK_MONOTONIC and CLOCK_BOOTTIME as they are. With it, up to 0.9.10 (Debian 12), every
time.sleep fails with EINVAL: Python sleeps until a time on the monotonic clock, and the library takes that time for one on the
wall clock. So the server is started by this module, which lets it wait for an event instead.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import SupportsIndex

COMMAND = (sys.executable, "-m", "tests.e2e.faked_time")
_NAME = "libfaketime.so.1"
_PLACES = ("usr/lib/*/faketime", "usr/lib/faketime", "usr/lib64/faketime", "usr/local/lib/faketime")


def library() -> Path | None:
    """Where it is on this machine; None where it is not."""
    found = [path for place in _PLACES for path in Path("/").glob(f"{place}/{_NAME}")]
    return found[0] if found else None


def environment(off: float | Path) -> dict[str, str]:
    """For a process whose wall clock is off by so much, or by what stands in that file at any time (see `set_clock`)."""
    how = {"FAKETIME": f"{off:+.0f}s"} if isinstance(off, float) else {"FAKETIME_TIMESTAMP_FILE": str(off)}
    return {"LD_PRELOAD": str(library()), "FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKETIME_NO_CACHE": "1", **how}


def set_clock(file: Path, off_s: float) -> None:
    part = file.with_suffix(".part")
    part.write_text(f"{off_s:+.0f}s\n", encoding="ascii")
    part.rename(file)


def bury(pid: int) -> None:
    """It leaves its shared memory behind where the process was killed."""
    for name in (f"faketime_shm_{pid}", f"sem.faketime_sem_{pid}"):
        Path("/dev/shm", name).unlink(missing_ok=True)  # noqa: S108 - the library's choice


def sleep(seconds: float | SupportsIndex) -> None:
    threading.Event().wait(float(seconds))


if __name__ == "__main__":
    time.sleep = sleep
    from gpu_worker_pool.gpu_server import main

    sys.exit(main())
