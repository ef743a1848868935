"""The process of the keeper: how a command reaches it, and starts it where there is none; and its own side of that."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from gpu_worker_pool.failure import Failure
from gpu_worker_pool.host.connections import unix_peer
from gpu_worker_pool.wire.reader import plain

from .job_spec import without_lease
from .job_store import JOBS_DIR_VARIABLE, JobStore

LOCK_FILE: Final = "keeper.lock"
FACTS_FILE: Final = "keeper.json"
LOG_FILE: Final = "keeper.log"
_MAIN: Final = (
    "import sys; sys.path.append(sys.argv.pop(1)); from gpu_worker_pool.__main__ import main; sys.exit(main())"
)
# Neither by -m nor from the user's folder: a file of theirs may have the name of a module.
GPU_POOL: Final = (sys.executable, "-P", "-c", _MAIN, str(Path(__file__).parents[2]))
# A keeper that ends and one that starts may cross; each round waits for one of them.
_ROUNDS: Final = 5
_START_S: Final = 60.0
# A keeper answers at once, unless it is stopped.
_ANSWER_S: Final = 5.0
_LONGEST_LOG_BYTES: Final = 1 << 20
# How long another keeper may take to answer, or to end.
_OTHER_S: Final = 10.0
_LOOK_AGAIN_S: Final = 0.05
_MOST_UNWRITTEN: Final = 100
_unwritten: list[str] = []


class KeeperSilent(Failure):
    """A keeper is there, and does not answer."""


class NoKeeper(Exception):  # noqa: N818 - a fact
    """No keeper answers."""


# --- for commands --------------------------------------------------------------------------------------------------------


def wake_keeper(store: JobStore) -> int:
    """Have the keeper look at the files of the jobs; start it where there is none. Its pid. Failure where it cannot be
    started, or can write nothing.
    """
    for _ in range(_ROUNDS):
        with suppress(NoKeeper):
            try:
                pid = poke(store)
            except NoKeeper:
                pid = start_keeper(store)
            store.check_room()
            return pid
    raise Failure(f"the keeper of the jobs does not answer; see {store.root / LOG_FILE}")


def poke(store: JobStore) -> int:
    """Have the keeper look at the files of the jobs; its pid. NoKeeper, or KeeperSilent."""
    pid = None
    try:
        facts = json.loads((store.root / FACTS_FILE).read_bytes())
        pid = facts["pid"]
        return _ask(facts["address"], _ANSWER_S)
    except TimeoutError:
        raise KeeperSilent(
            f"the keeper of the jobs (pid {pid}) does not answer; if it is stopped, kill -CONT {pid} continues it, and "
            f"kill -9 {pid} makes way for another one; jobs that run go on. Its log is {store.root / LOG_FILE}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError):
        raise NoKeeper from None


def _ask(address: str, within_s: float) -> int:
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(within_s)
        line.connect(f"\0{address}")
        if unix_peer(line)[1] != os.geteuid():
            raise NoKeeper  # any user may have taken the name
        return int(line.recv(64))


def start_keeper(store: JobStore) -> int:
    """Start a keeper that has no terminal and outlives this process; its pid, once it answers. Failure where it cannot be
    started; NoKeeper where it has ended, because another one is there, or was killed.

    Its standard input is the socket at which it is to listen, so what is asked here waits for it.
    """
    store.make()
    # It outlives a lease or a job around this process, and does not belong to either.
    env = {**without_lease(os.environ), JOBS_DIR_VARIABLE: str(store.root)}
    try:
        with _listener() as listener, _open_log(store.root / LOG_FILE) as log:
            address = listener.getsockname()[1:].decode()
            process = subprocess.Popen(  # noqa: S603 - our own program
                [*GPU_POOL, "keeper"],
                cwd="/",
                stdin=listener.fileno(),
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )
    except OSError as error:
        raise Failure(f"the keeper of the jobs cannot be started: {error.strerror}") from None
    try:
        return _ask(address, _START_S)
    except TimeoutError:
        process.kill()
        process.wait()
    except (OSError, ValueError):
        # One that was killed has not failed: another one can be started.
        if process.wait() <= 0:
            raise NoKeeper from None
    why = _last_line(store.root / LOG_FILE) or f"see {store.root / LOG_FILE}"
    raise Failure(f"the keeper of the jobs cannot be started: {why}")


def _listener() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0gpu-worker-pool/keeper/{secrets.token_hex(16)}")
    listener.listen(64)
    return listener


def _open_log(path: Path) -> BinaryIO:
    try:
        if path.exists() and path.stat().st_size > _LONGEST_LOG_BYTES:
            path.replace(path.with_suffix(".log.old"))
        return open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))
    except OSError:
        return open(os.devnull, "ab")  # noqa: PTH123 - a disk that is full has no room for it


def _last_line(path: Path) -> str:
    try:
        return plain(path.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2])
    except OSError:
        return ""


# --- the keeper's side -------------------------------------------------------------------------------------------------


def become_keeper(store: JobStore, *, waits: bool) -> int | None:
    """Have what a keeper needs: its folder, its signals, its lock. None where another keeper is there; one that `waits` takes
    over when that one ends. Failure where it cannot be.
    """
    _settle_signals()
    store.make()
    os.umask(0o077)
    os.chdir("/")
    give_up_at = time.monotonic() + _OTHER_S
    while (lock := _lock(store.root, waits=waits)) is None:
        with suppress(NoKeeper):
            poke(store)
            return None
        if time.monotonic() >= give_up_at:
            raise Failure(f"another keeper has {store.root} and does not answer; is it in a container, or stopped?")
        time.sleep(_LOOK_AGAIN_S)
    return lock


def _lock(root: Path, *, waits: bool) -> int | None:
    """The lock that one keeper has; None where another one has it, and this one does not wait. It goes with the process."""
    descriptor = os.open(root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _settle_signals() -> None:
    """Have the signals of a program that was just started, whatever shell this was started from; the jobs inherit them.

    It ends at once when it is told to end: all that it knows is on the disk. A terminal that hangs up is not its own.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


async def listen(store: JobStore, on_poke: Callable[[], Awaitable[None]]) -> asyncio.Server:
    """Answer commands of this user with the pid of this process, once `on_poke` has returned, or after a while. The address is
    in a file that only this user can read. Failure where that file cannot be written.
    """

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if unix_peer(writer.get_extra_info("socket"))[1] in {0, os.geteuid()}:
            with suppress(TimeoutError):
                async with asyncio.timeout(_ANSWER_S / 2):
                    await on_poke()
            writer.write(f"{os.getpid()}\n".encode())
        writer.close()

    listener = _given_listener() or _listener()
    address = listener.getsockname()[1:].decode()
    server = await asyncio.start_unix_server(answer, sock=listener)
    facts = store.root / FACTS_FILE
    try:
        new = facts.with_suffix(".new")
        new.write_text(json.dumps({"pid": os.getpid(), "address": address}), encoding="ascii")
        new.replace(facts)
    except OSError as error:
        raise Failure(f"{facts} cannot be written: {error.strerror}; make room on the disk") from None
    return server


def _given_listener() -> socket.socket | None:
    """Standard input, where `start_keeper` has started this process."""
    try:
        given = socket.socket(fileno=os.dup(0))
    except OSError:
        return None
    if not given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        given.close()
        return None
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - at once
        os.dup2(nothing.fileno(), 0)
    return given


def log(message: str) -> None:
    """Write a line to the log of the keeper, which is the standard error of the keeper and of its supervisors. What a full disk
    has no room for is written later.
    """
    _unwritten.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {plain(message)}\n")
    del _unwritten[:-_MOST_UNWRITTEN]
    with suppress(OSError):
        os.write(2, "".join(_unwritten).encode())
        _unwritten.clear()
