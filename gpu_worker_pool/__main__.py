"""`python -m gpu_worker_pool` and `gpu-pool`: the command line."""

from __future__ import annotations

import gc
import io
import os
import sys

# How many new objects make Python look for garbage among them; 700 by itself. Loading makes a hundred thousand and no garbage,
# and to look through them again and again takes a tenth of a command's time.
_OBJECTS_UNTIL_COLLECTION = 20_000


def main() -> int:
    """Run the command line; says what to install where it is not."""
    _repair_streams()
    gc.set_threshold(_OBJECTS_UNTIL_COLLECTION)
    try:
        from .cli.app import main as run  # noqa: PLC0415 - may be missing
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("gpu_worker_pool"):
            raise
        print(f"gpu-pool: {error.name} is not installed; pip install 'gpu-worker-pool[cli]'", file=sys.stderr)  # noqa: T201
        return 125
    return run(sys.argv[1:])


def _repair_streams() -> None:
    """A standard stream that somebody closed (`<&-`) must not have its number taken by a socket of ours, for our child to
    write to; and what a stream cannot encode is written as a question mark, for one user's name must not end another's
    command.
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
