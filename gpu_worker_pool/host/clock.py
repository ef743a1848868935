"""The clock that leases are reckoned on, and which run of the machine it belongs to."""

from __future__ import annotations

import platform
import subprocess
import time
from functools import cache
from hashlib import sha256
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SYSCTL = "/usr/sbin/sysctl"
_SYSCTL_S = 5.0
_ROUNDED_TO_S = 60.0

# A laptop that slept through its leases must not wake up and hold them still, so the time asleep has to count. On
# Linux the monotonic clock leaves it out and this one has it; where there is none, monotonic is the best there is.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_time() -> float:
    """Seconds that only go forward, whatever is done to the wall clock; comparable within one `boot_id` only."""
    return time.clock_gettime(_CLOCK)


def wall_offset() -> float:
    """What to add to `boot_time` to get the time of day, as of now: the wall clock may be set at any moment."""
    return time.time() - boot_time()


@cache
def boot_id() -> str:
    """A name for this run of the machine: the same for all its processes and containers, another after a reboot.

    Linux and macOS name it themselves. Elsewhere it is made from the time at which the clock began, to the minute: two
    processes may then differ at the edge of a minute or after the wall clock was set, and count as two boots.
    """
    return _named_by_linux() or _named_by_macos() or f"began-{round(wall_offset() / _ROUNDED_TO_S)}"


@cache
def machine_fingerprint() -> str:
    """The same for two programs only if they run on one machine, since the same start of it. It may be shown to anybody:
    unlike the boot id, which a holder of a lease proves with that he is here, it proves nothing.
    """
    return sha256(f"gpu-worker-pool {boot_id()}".encode()).hexdigest()[:16]


def _named_by_linux() -> str | None:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeError):
        return None


def _named_by_macos() -> str | None:
    if platform.system() != "Darwin":
        return None
    # Not kern.boottime: that one moves whenever the wall clock is set.
    command = [_SYSCTL, "-n", "kern.bootsessionuuid"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SYSCTL_S, check=False)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
