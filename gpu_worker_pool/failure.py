"""The failure that ends a command, and the exit codes."""

from __future__ import annotations

from typing import Final

# The server ended the lease of a command, as the request allowed: another request needed the GPU, or it was idle.
TAKEN_BACK: Final = 122
# The time limit of a command is over. It ran, so this is not the code for a wait that took too long.
TIME_LIMIT: Final = 123
# The next four are those of timeout(1), which scripts know: a failure of ours must not look like a failure of the command.
# The wait for a GPU took longer than it may.
TIMED_OUT: Final = 124
# gpu-pool itself failed, for example because no server answers.
FAILED: Final = 125
# The command is there and cannot be run.
CANNOT_RUN: Final = 126
# There is no such command.
NOT_FOUND: Final = 127
# 128 and the number of a signal: it ended the command.
SIGNAL_BASE: Final = 128
# The arguments are invalid.
USAGE: Final = 2
# The server said no. Where it could not answer at all, it is 125.
REFUSED: Final = 1


class Failure(Exception):  # noqa: N818 - it is not an error of the program
    """A command cannot continue. The message says what is wrong and what to do; `code` is the exit code."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code
