"""The key of a fleet in the state directory: a leader makes it, and the other boxes keep what they were given once."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from gpu_worker_pool.host.state_dir import check_files, create_private, make_state_dir, state_dir, sync_folder

from .agent.handshake import LEAST_CHARACTERS
from .settings import ServerSettings

# What `GPU_POOL_FLEET` is on a box that leads with its own journal (`serve --lead`).
LEAD = "lead"
FILE_NAME = "fleet-key"


def key_path(settings: ServerSettings) -> Path:
    """Where this box keeps the key. StateDirError if there is no directory for it."""
    folder = state_dir(settings.gpu_pool_state_dir, os.environ, platform=sys.platform, uid=os.getuid())
    return folder.absolute() / FILE_NAME


def kept_key(settings: ServerSettings) -> str:
    """The key that this box keeps; empty if it keeps none. StateDirError if another user could have written it."""
    path = key_path(settings)
    check_files(path)
    return path.read_text("utf-8").strip() if path.exists() else ""


def keep_key(settings: ServerSettings) -> None:
    """Keep the key that was given, so that it is needed only once, or make one where this box leads. OSError or StateDirError
    if the file cannot be written.
    """
    fleet = settings.gpu_pool_fleet.get_secret_value().strip() if settings.gpu_pool_fleet else ""
    given = settings.gpu_pool_fleet_key.get_secret_value().strip() if settings.gpu_pool_fleet_key else ""
    if settings.gpu_pool_fleet_key_file or not (fleet == LEAD or (given and fleet.startswith("http"))):
        return
    known = kept_key(settings)
    if (known and given in ("", known)) or 0 < len(given) < LEAST_CHARACTERS:
        return  # one that is too short is refused, and not kept
    path = key_path(settings)
    make_state_dir(path.parent)
    draft = path.with_name(f"{FILE_NAME}.new")
    draft.unlink(missing_ok=True)
    create_private(draft)
    draft.write_text(f"{given or secrets.token_hex(32)}\n", "utf-8")
    draft.rename(path)
    sync_folder(path.parent)


def join_line(key: str, address: str) -> str:
    """What to paste on the other boxes. The key is not an option: every user of a machine can read command lines."""
    return f"GPU_POOL_FLEET_KEY={key} gpu-pool serve --join {address}"
