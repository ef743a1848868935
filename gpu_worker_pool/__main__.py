"""`python -m gpu_worker_pool` and `gpu-pool`: the command line."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Run the command line; says what to install where it is not."""
    _fill_closed_streams()
    try:
        from gpu_worker_pool.cli.app import main as run  # noqa: PLC0415 - may be missing
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("gpu_worker_pool"):
            raise
        print(f"gpu-pool: {error.name} is not installed; pip install 'gpu-worker-pool[cli]'", file=sys.stderr)  # noqa: T201
        return 125
    return run(sys.argv[1:])


def _fill_closed_streams() -> None:
    """Whoever closed a standard stream (`<&-`) must not have a socket of ours take its number, for our child to write to."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)  # noqa: FBT003 - its only value
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
