"""How a command reaches the keeper of its user, and starts it where there is none."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import gpu_worker_pool
from gpu_worker_pool.cli.failure import Failure

from .job_store import JOBS_DIR_VARIABLE, JobStore

if TYPE_CHECKING:
    import asyncio

LOCK_FILE: Final = "keeper.lock"
FACTS_FILE: Final = "keeper.json"
LOG_FILE: Final = "keeper.log"
READY_VARIABLE: Final = "GPU_POOL_KEEPER_READY"
_MAIN: Final = (
    "import sys; sys.path.append(sys.argv.pop(1)); from gpu_worker_pool.__main__ import main; sys.exit(main())"
)
# Neither by -m nor from the user's folder: a file of theirs may have the name of a module.
GPU_POOL: Final = (sys.executable, "-P", "-c", _MAIN, str(Path(gpu_worker_pool.__file__).parents[1]))
_KEEPER_NEEDS: Final = (
    "GPU_POOL_JOBS_",
    "HOME",
    "LANG",
    "LC_",
    "LD_LIBRARY_PATH",
    "LOGNAME",
    "PATH",
    "PYTHON",
    "SSL_",
    "TMPDIR",
    "TZ",
    "USER",
    "XDG_",
)
_CREDENTIALS: Final = struct.Struct("3i")
_MOST_BYTES: Final = 64 * 1024 * 1024
# A keeper that ends and one that starts may cross; each round waits for one of them.
_ROUNDS: Final = 5
_START_S: Final = 60.0
# A keeper takes a question at once, unless it is stopped. Its answer may depend on servers and disks.
_HELLO_S: Final = 5.0
_ANSWER_S: Final = 60.0


class KeeperSilent(Failure):
    """A keeper is there, and does not answer."""


class NoKeeper(Exception):  # noqa: N818 - a fact
    """No keeper answers."""


def ask_keeper(store: JobStore, question: Mapping[str, Any], *, starts: bool = True) -> dict[str, Any]:
    """Ask the keeper; start it first where there is none. Failure where it cannot be started, or refuses."""
    for _ in range(_ROUNDS):
        try:
            return _ask(store.root, question)
        except NoKeeper:
            if not starts:
                raise
            start_keeper(store)
    raise Failure(f"the keeper of the jobs does not answer; see {store.root / LOG_FILE}")


def _ask(root: Path, question: Mapping[str, Any]) -> dict[str, Any]:
    try:
        facts = json.loads((root / FACTS_FILE).read_bytes())
        line = socket.socket(socket.AF_UNIX)
    except (OSError, ValueError):
        raise NoKeeper from None
    with line:
        try:
            line.settimeout(_HELLO_S)
            line.connect(f"\0{facts['address']}")
            if uid_at(line) != os.geteuid():
                raise NoKeeper
            line.sendall(json.dumps(question).encode() + b"\n")
            with line.makefile("rb") as file:
                json.loads(file.readline(_MOST_BYTES))
                line.settimeout(_ANSWER_S)
                answer = json.loads(file.readline(_MOST_BYTES))
        except TimeoutError:
            pid = facts.get("pid")
            raise KeeperSilent(
                f"the keeper of the jobs (pid {pid}) does not answer; if it is stopped, kill -CONT {pid} lets it go on, and "
                f"kill -9 {pid} makes room for another one: what runs goes on. Its log is {root / LOG_FILE}"
            ) from None
        except (OSError, ValueError, KeyError, TypeError):
            raise NoKeeper from None
    if not isinstance(answer, dict):
        raise NoKeeper
    if error := answer.get("error"):
        raise Failure(str(error))
    return answer


def start_keeper(store: JobStore) -> None:
    """Start a keeper that has no terminal and outlives this process; wait until it answers. Failure where it cannot."""
    store.make()
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    env = {**os.environ, JOBS_DIR_VARIABLE: str(store.root), READY_VARIABLE: str(theirs)}
    with _open_log(store.root / LOG_FILE) as log:
        process = subprocess.Popen(  # noqa: S603 - our own program
            [*GPU_POOL, "keeper", "--detach"],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            pass_fds=[theirs],
            start_new_session=True,
        )
    os.close(theirs)
    process.wait()  # it has forked by then
    said = _read_until(ours, time.monotonic() + _START_S)
    os.close(ours)
    if said != b"ready":
        reason = said.decode(errors="replace") or f"it did not start; see {store.root / LOG_FILE}"
        raise Failure(f"the keeper of the jobs cannot be started: {reason}")


def keeper_to_start(store: JobStore) -> dict[str, Any]:
    """What a guard must know to start a keeper. Of this process's environment it has what a keeper needs; each job has its own."""
    env = {name: value for name, value in os.environ.items() if name.startswith(_KEEPER_NEEDS)}
    return {
        "argv": [*GPU_POOL, "keeper", "--detach"],
        "env": {**env, JOBS_DIR_VARIABLE: str(store.root)},
        "log": str(store.root / LOG_FILE),
        "lock": str(store.root / LOCK_FILE),
    }


def _read_until(descriptor: int, until: float) -> bytes:
    """What is written there until it is closed."""
    import select  # noqa: PLC0415 - only where a keeper is started

    said = b""
    while select.select([descriptor], [], [], max(until - time.monotonic(), 0.0))[0]:
        data = os.read(descriptor, 4096)
        if not data:
            break
        said += data
    return said


def _open_log(path: Path) -> BinaryIO:
    try:
        return open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))
    except OSError:
        return open(os.devnull, "ab")  # noqa: PTH123 - a disk that is full has no room for it


# --- the keeper's side -------------------------------------------------------------------------------------------------


class Ready:
    """Tells the process that started this keeper that it is ready, or why it is not."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        text = environ.get(READY_VARIABLE, "")
        self._descriptor = int(text) if text.isdigit() else None
        if self._descriptor is not None:
            os.set_inheritable(self._descriptor, False)  # noqa: FBT003 - its only parameter

    def say(self, text: str) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.write(self._descriptor, text.encode())
            os.close(self._descriptor)
            self._descriptor = None


def detach() -> None:
    """Leave the process that started this one: with a second fork, no terminal can become this process's own."""
    if os.fork():
        os._exit(0)


def lock_keeper(root: Path) -> int | None:
    """The lock that one keeper has; None where another one has it. The lock goes with the process."""
    descriptor = os.open(root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def is_own_peer(writer: asyncio.StreamWriter) -> bool:
    """Whether this user, or root, is at the other end."""
    return uid_at(writer.get_extra_info("socket")) in {0, os.geteuid()}


def uid_at(line: socket.socket) -> int:
    """The user at the other end of a Unix socket: any user may have taken a name."""
    _, uid, _ = _CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)
