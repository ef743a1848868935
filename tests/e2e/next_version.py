"""A server of the next version, whose journal has one more migration: `python -m tests.e2e.next_version`."""

from __future__ import annotations

import sys

from gpu_worker_pool.ledger.sql_files import Migration
from gpu_worker_pool.ledger.sqlite import journal as sqlite
from gpu_worker_pool.ledger.sqlite.migrations import known_migrations

COMMAND = (sys.executable, "-m", "tests.e2e.next_version")
NEXT = Migration(known_migrations()[-1].version + 1, "CREATE TABLE of_the_next_version (a INTEGER);\n")

if __name__ == "__main__":
    from gpu_worker_pool.gpu_server import main

    # What installing it would do.
    vars(sqlite)["known_migrations"] = lambda: (*known_migrations(), NEXT)
    sys.exit(main())
