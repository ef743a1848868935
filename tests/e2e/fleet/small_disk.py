"""A PostgreSQL on a small disk of its own that can be filled: `unshare --mount python -m tests.e2e.fleet.small_disk`.

It says its port, and then does what it is told on standard input: `fill` or `free`. The disk is in memory, and goes with
the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.ledger.postgres.server import PostgresServer


def main() -> None:
    # Only for this process; the folder itself is used by nobody.
    folder = Path("/mnt")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m,mode=755", "tmpfs", folder], check=False)
    if mounted.returncode:
        return
    tempfile.tempdir = str(folder)
    server = PostgresServer()
    filler = folder / "filler"
    print(server.port, flush=True)  # noqa: T201
    for line in sys.stdin:
        if line.strip() == "fill":
            fill(filler)
        else:
            filler.unlink()
        print("done", flush=True)  # noqa: T201
    server.kill()


def fill(path: Path) -> None:
    """Take all that is left."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while os.write(descriptor, bytes(1 << 16)):
            pass
    except OSError:
        pass  # there is no space any more
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()
