"""`python -m gpu_worker_pool` and `gpu-pool`: the command line."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; says what to install where it is not."""
    try:
        from gpu_worker_pool.cli.app import main as run  # noqa: PLC0415 - may be missing
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("gpu_worker_pool"):
            raise
        print(f"gpu-pool: {error.name} is not installed; pip install 'gpu-worker-pool[cli]'", file=sys.stderr)  # noqa: T201
        return 125
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
