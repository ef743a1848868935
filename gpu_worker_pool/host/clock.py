"""The clock for leases, and the boot it belongs to."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ROUNDED_TO_S = 60.0

# Time asleep must count: a laptop that slept past its leases must not wake up and still hold them. On Linux
# CLOCK_MONOTONIC leaves it out and CLOCK_BOOTTIME counts it. Elsewhere monotonic is the best there is.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_time() -> float:
    """Seconds on a clock that never goes back; comparable within one `boot_id` only."""
    return time.clock_gettime(_CLOCK)


def wall_offset() -> float:
    """The difference from `boot_time` to the time of day, as of now: the wall clock may be set at any moment."""
    return time.time() - boot_time()


def iso_time(wall_s: float | None) -> str | None:
    """A time of day in ISO 8601 and UTC; None for None, and where the wall clock was wrong when it was written."""
    if wall_s is None:
        return None
    try:
        return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return None


@cache
def boot_id() -> str:
    """An id of this boot of the machine: the same for all its processes and containers, different after a reboot.

    Linux provides one. Elsewhere it is the start of the clock to the minute: two processes may then differ at
    the edge of a minute or after the wall clock was set, and count as two boots.
    """
    return _named_by_linux() or f"began-{round(wall_offset() / _ROUNDED_TO_S)}"


@cache
def machine_fingerprint() -> str:
    """A public value that two programs share only on one machine and boot. The boot id is the proof, and not public."""
    from hashlib import sha256  # noqa: PLC0415 - a command that only looks needs none of it

    return sha256(f"gpu-worker-pool {boot_id()}".encode()).hexdigest()[:16]


def _named_by_linux() -> str | None:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeError):
        return None
