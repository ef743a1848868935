"""How a command reaches the keeper of its user, and starts it where there is none; and the keeper's side of that."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import secrets
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from gpu_worker_pool.failure import Failure

from .job_store import JOBS_DIR_VARIABLE, JobStore

LOCK_FILE: Final = "keeper.lock"
FACTS_FILE: Final = "keeper.json"
LOG_FILE: Final = "keeper.log"
READY_VARIABLE: Final = "GPU_POOL_KEEPER_READY"
_MAIN: Final = (
    "import sys; sys.path.append(sys.argv.pop(1)); from gpu_worker_pool.__main__ import main; sys.exit(main())"
)
# Neither by -m nor from the user's folder: a file of theirs may have the name of a module.
GPU_POOL: Final = (sys.executable, "-P", "-c", _MAIN, str(Path(__file__).parents[2]))
_OF_OTHERS: Final = ("GPU_POOL_GUARD", "GPU_POOL_LEASE_", "GPU_POOL_JOB_ID")
_CREDENTIALS: Final = struct.Struct("3i")
# A keeper that ends and one that starts may cross; each round waits for one of them.
_ROUNDS: Final = 5
_START_S: Final = 60.0
# A keeper answers at once, unless it is stopped.
_ANSWER_S: Final = 5.0


class KeeperSilent(Failure):
    """A keeper is there, and does not answer."""


class NoKeeper(Exception):  # noqa: N818 - a fact
    """No keeper answers."""


def wake_keeper(store: JobStore) -> int:
    """Have the keeper look at the files of the jobs; start it where there is none. Its pid. Failure where it cannot be
    started.
    """
    for _ in range(_ROUNDS):
        try:
            return poke(store)
        except NoKeeper:
            start_keeper(store)
    raise Failure(f"the keeper of the jobs does not answer; see {store.root / LOG_FILE}")


def poke(store: JobStore) -> int:
    """Have the keeper look at the files of the jobs; its pid. NoKeeper, or KeeperSilent."""
    pid = None
    try:
        facts = json.loads((store.root / FACTS_FILE).read_bytes())
        pid = facts["pid"]
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(_ANSWER_S)
            line.connect(f"\0{facts['address']}")
            if uid_at(line) != os.geteuid():
                raise NoKeeper  # any user may have taken the name
            return int(line.recv(64))
    except TimeoutError:
        raise KeeperSilent(
            f"the keeper of the jobs (pid {pid}) does not answer; if it is stopped, kill -CONT {pid} lets it go on, and "
            f"kill -9 {pid} makes room for another one: what runs goes on. Its log is {store.root / LOG_FILE}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError):
        raise NoKeeper from None


def start_keeper(store: JobStore) -> None:
    """Start a keeper that has no terminal and outlives this process; wait until it answers. Failure where it cannot."""
    store.make()
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    # It outlives a lease or a job around this process, and does not belong to either.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_OTHERS)}
    env = {**kept, JOBS_DIR_VARIABLE: str(store.root), READY_VARIABLE: str(theirs)}
    try:
        try:
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
        finally:
            os.close(theirs)
        process.wait()  # it has forked by then
        said = _read_until(ours, time.monotonic() + _START_S)
    except OSError as error:
        raise Failure(f"the keeper of the jobs cannot be started: {error.strerror}") from None
    finally:
        os.close(ours)
    if said != b"ready":
        reason = said.decode(errors="replace") or f"it did not start; see {store.root / LOG_FILE}"
        raise Failure(f"the keeper of the jobs cannot be started: {reason}")


def _read_until(descriptor: int, until: float) -> bytes:
    """What is written there until it is closed."""
    said, ready = b"", select.poll()
    ready.register(descriptor, select.POLLIN)
    while ready.poll(max(until - time.monotonic(), 0.0) * 1000):
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


def uid_at(line: socket.socket) -> int:
    """The user at the other end of a Unix socket."""
    _, uid, _ = _CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


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


def lock_keeper(root: Path) -> int | None:
    """The lock that one keeper has; None where another one has it. The lock goes with the process."""
    descriptor = os.open(root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


async def listen(store: JobStore, on_poke: Callable[[], Awaitable[None]]) -> asyncio.Server:
    """Answer commands of this user with the pid of this process, once `on_poke` has returned, or after a while. The address is
    in a file that only this user can read. Failure where that file cannot be written.
    """

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if uid_at(writer.get_extra_info("socket")) in {0, os.geteuid()}:
            with suppress(TimeoutError):
                async with asyncio.timeout(_ANSWER_S / 2):
                    await on_poke()
            writer.write(f"{os.getpid()}\n".encode())
        writer.close()

    address = f"gpu-worker-pool/keeper/{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{address}")
    server = await asyncio.start_unix_server(answer, sock=listener)
    facts = store.root / FACTS_FILE
    try:
        new = facts.with_suffix(".new")
        new.write_text(json.dumps({"pid": os.getpid(), "address": address}), encoding="ascii")
        new.replace(facts)
    except OSError as error:
        raise Failure(f"{facts} cannot be written: {error.strerror}; make room on the disk") from None
    return server
