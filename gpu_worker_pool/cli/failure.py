"""What ends a command, as its user is told it."""

from __future__ import annotations

from typing import Final

# As timeout(1) has them, because scripts know them: what a command's own failure is must not look like its child's.
TIMED_OUT: Final = 124
FAILED: Final = 125
CANNOT_RUN: Final = 126
NOT_FOUND: Final = 127
SIGNAL_BASE: Final = 128
# What was typed makes no sense.
USAGE: Final = 2


class Failure(Exception):  # noqa: N818 - what happened, not a mistake of the program
    """A command cannot go on: what happened, what to do, and the exit code. Nothing was changed."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code
