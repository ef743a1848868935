"""The directory of the journal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .journal import JournalError

FOLDER = "gpu-worker-pool"


def state_dir(configured: str | None, environ: Mapping[str, str], *, platform: str, uid: int) -> Path:
    """The configured directory (GPU_POOL_STATE_DIR), else the one that systemd made, else the platform's default."""
    if configured:
        return _expanded(configured, environ, uid)
    # systemd separates several directories with colons.
    if by_systemd := environ.get("STATE_DIRECTORY", "").split(":")[0]:
        return Path(by_systemd)
    if platform == "darwin":
        return _home(environ, uid) / "Library" / "Application Support" / FOLDER
    if platform.startswith("linux") and uid == 0:
        return Path("/var/lib") / FOLDER
    xdg = environ.get("XDG_STATE_HOME", "")
    # The XDG specification says to ignore a relative path.
    if xdg.startswith("/"):
        return Path(xdg) / FOLDER
    return _home(environ, uid) / ".local" / "state" / FOLDER


def _expanded(configured: str, environ: Mapping[str, str], uid: int) -> Path:
    """Expand ~: values in an env file have not passed through a shell."""
    if configured == "~" or configured.startswith("~/"):
        return _home(environ, uid) / configured[2:]
    return Path(configured)


def _home(environ: Mapping[str, str], uid: int) -> Path:
    if home := environ.get("HOME"):
        return Path(home)
    try:
        import pwd  # noqa: PLC0415 - not on every platform

        return Path(pwd.getpwuid(uid).pw_dir)
    except (ImportError, KeyError):
        raise JournalError(
            f"the user with uid {uid} has no home directory to keep the leases in; set GPU_POOL_STATE_DIR to a folder "
            "that outlives the server"
        ) from None
