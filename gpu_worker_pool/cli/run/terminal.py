"""The terminal that controls `gpu-pool`."""

from __future__ import annotations

import os


def has_controlling_terminal() -> bool:
    """Whether a terminal controls this process.

    The command then shares our process group: what is typed reaches it, and the shell's job control (Ctrl-Z, fg, bg)
    takes both for one job.
    """
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
