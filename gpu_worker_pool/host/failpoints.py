"""Points at which a process can be made to kill itself.

For the tests that kill the server at every boundary of the journal, and for nothing else. With
GPU_POOL_FAILPOINT=in_append:3 in its environment the process sends itself SIGKILL when it passes `in_append` for the
third time. Without the variable, a failpoint is one comparison.
"""

from __future__ import annotations

import os
import signal

FAILPOINTS = (
    "before_append",  # nothing is written yet
    "in_append",  # all is written, nothing is committed
    "after_append",  # committed, no client has been told
    "in_compaction",  # the old events are replaced by the new ones, nothing is committed
    "after_compaction",  # committed, nothing is forgotten yet
    "in_creation",  # the tables are made, nothing is committed
    "after_creation",  # committed, a file is not yet in its place
    "in_backup",  # the copy is whole, and does not have its name yet
    "in_replacement",  # the old file is set aside, the new one is not yet in its place
)


class _Failpoint:
    def __init__(self, setting: str) -> None:
        self.name, _, times = setting.partition(":")
        if self.name not in FAILPOINTS or not (times or "1").isdecimal():
            raise ValueError(f"GPU_POOL_FAILPOINT is {setting!r}; it must be one of {', '.join(FAILPOINTS)}, or name:n")
        self.left = int(times or "1")


_failpoint = _Failpoint(os.environ["GPU_POOL_FAILPOINT"]) if "GPU_POOL_FAILPOINT" in os.environ else None


def reach(name: str) -> None:
    """Pass a failpoint; does not return if this is the one and its count is reached."""
    if _failpoint is not None and _failpoint.name == name:
        _failpoint.left -= 1
        if _failpoint.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
