"""What systemd does with the processes of a user who logs out."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

_YES: Final = frozenset({"1", "yes", "y", "true", "t", "on"})


def logout_ends(pid: int, root: Path = Path("/")) -> bool:
    """Whether systemd ends this process when its user logs out: it belongs to a session, and `KillUserProcesses` is set."""
    try:
        is_of_session = "/session-" in (root / f"proc/{pid}/cgroup").read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        return False
    folders = [root / place / "systemd/logind.conf.d" for place in ("usr/lib", "run", "etc")]
    # A file of the same name in a later folder replaces the one before; all are read in the order of their names.
    named = {path.name: path for folder in folders for path in sorted(folder.glob("*.conf"))}
    kills = False
    for path in (root / "etc/systemd/logind.conf", *(named[name] for name in sorted(named))):
        with suppress(OSError, UnicodeError):
            for line in path.read_text(encoding="utf-8").splitlines():
                name, _, value = line.partition("=")
                if name.strip() == "KillUserProcesses":
                    kills = value.strip().lower() in _YES
    return is_of_session and kills
