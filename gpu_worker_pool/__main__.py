"""`python -m gpu_worker_pool` and `gpu-pool`: the command line."""

from __future__ import annotations

import gc
import io
import logging
import os
import sys

# The number of new objects that triggers a garbage collection; Python's default is 700. Loading makes a hundred
# thousand objects and no garbage, and scanning them again and again takes a tenth of a command's time.
_OBJECTS_UNTIL_COLLECTION = 20_000


def main() -> int:
    """Run the command line."""
    _repair_streams()
    gc.set_threshold(_OBJECTS_UNTIL_COLLECTION)
    from .cli.app import main as run  # noqa: PLC0415 - after the streams are in order
    from .cli.output import WarningHandler, complain  # noqa: PLC0415

    # For what is logged outside `run`, `batch` and the server, which have handlers of their own.
    logging.lastResort = WarningHandler(complain)
    return run(sys.argv[1:])


def _repair_streams() -> None:
    """Replace closed standard streams, and never fail on a character that a stream cannot encode.

    A socket must not get the number of a closed standard stream (`<&-`), because a child would write to it. Characters
    that cannot be encoded become question marks: one user's name must not end another user's command.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)  # noqa: FBT003 - its only value
    os.close(descriptor)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - for good
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - for good
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
