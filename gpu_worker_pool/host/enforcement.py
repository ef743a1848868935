"""What `gpu-pool enforce` says of itself, for all programs of this machine: a file that root writes.

While it refuses the GPUs of others, CUDA counts only the GPUs that a process may open, so an index names another GPU than in
the pool: grants name GPUs by UUID then. And a device may be opened a moment after the grant.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .processes import PROC, read_process

# Names another file, for tests.
VARIABLE: Final = "GPU_POOL_ENFORCE_STATE"
_FILE: Final = Path("/run/gpu-pool-enforce.json")
DENY: Final = "deny"
_ACCESS_WITHIN_S: Final = 5.0
_TRY_AGAIN_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class Enforcement:
    """The mode, the process that enforces it, and the device of each GPU by its UUID."""

    mode: str
    pid: int
    started: float | None
    devices: Mapping[str, str]

    @property
    def is_running(self) -> bool:
        """Whether its process lives. Without it the devices stay as they are."""
        seen = read_process(PROC, self.pid)
        return seen is not None and not seen.has_ended and seen.id.started == self.started


def state_file() -> Path:
    """Where it is written."""
    return Path(os.environ.get(VARIABLE) or _FILE)


def read_enforcement() -> Enforcement | None:
    """None where nothing is enforced here."""
    try:
        said = json.loads(state_file().read_bytes())
        return Enforcement(said["mode"], said["pid"], said["started"], said["devices"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_denying() -> bool:
    """Whether processes on this machine see only GPUs that their user holds."""
    found = read_enforcement()
    return found is not None and found.mode == DENY


def wait_for_access(uuids: Iterable[str], limit_s: float = _ACCESS_WITHIN_S) -> bool:
    """Wait until this user may open the devices of these GPUs, which were granted just now; False where that takes too long."""
    found = read_enforcement()
    if found is None or found.mode != DENY:
        return True
    give_up_at = time.monotonic() + limit_s
    paths = [found.devices[uuid] for uuid in uuids if uuid in found.devices]
    while not all(os.access(path, os.R_OK | os.W_OK) for path in paths):
        if time.monotonic() > give_up_at:
            return False
        time.sleep(_TRY_AGAIN_S)
    return True
