"""A real PostgreSQL server for the tests, with what the demo's does not need: a standby, a role with a password, locks."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.ledger.postgres.process import PostgresProcess, as_owner, free_port, programs

__all__ = ["PostgresServer", "free_port", "programs"]

# One role needs its password; all others are trusted.
HBA = """
host all secret_role 127.0.0.1/32 scram-sha-256
host replication all 127.0.0.1/32 trust
host all all 127.0.0.1/32 trust
"""


class PostgresServer(PostgresProcess):
    def __init__(self, *, standby_of: PostgresServer | None = None, is_durable: bool = False) -> None:
        self._standby_of = standby_of
        super().__init__({"fsync": "on", "full_page_writes": "on"} if is_durable else None)

    def _set_up(self) -> None:
        if self._standby_of is None:
            super()._set_up()
            (self._data / "pg_hba.conf").write_text(HBA)
        else:
            self._standby_of.run_to_standby(self._data)

    def run_to_standby(self, data: Path) -> None:
        self._run(
            "pg_basebackup", "-D", str(data), "-d", self.url(), "-R", "-X", "stream", "--checkpoint=fast", "--no-sync"
        )

    def promote(self) -> None:
        self._run("pg_ctl", "promote", "-w", "-D", str(self._data))

    def send(self, what: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(what)

    def send_to_all(self, what: signal.Signals) -> None:
        """Send a signal to the server and to all its processes."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        for pid in (self._process.pid, *map(int, children.split())):
            with suppress(ProcessLookupError):
                os.kill(pid, what)

    @contextmanager
    def locked(self, table: str, database: str) -> Iterator[None]:
        """Keep all statements that change this table waiting."""
        command = [str(self._programs / "psql"), "-X", "-q", "-A", "-t", "-d", self.url(database)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **as_owner()) as psql:
            assert psql.stdin
            assert psql.stdout
            psql.stdin.write(f"BEGIN; LOCK TABLE {table} IN EXCLUSIVE MODE; SELECT 'locked';\n")
            psql.stdin.flush()
            assert psql.stdout.readline() == "locked\n"
            yield
