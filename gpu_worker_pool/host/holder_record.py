"""The processes of this machine that hold leases of a server, in a file that servers of all users can read.

A holder may bind no mark of its own: it calls by HTTP, it was named by another process, or it became another program. A
server that is started after the death of the one that granted finds these holders here. Memory is the right place: a
reboot ends all of them.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpu_worker_pool.core.model.gpu import ProcessId

from .clock import boot_id
from .gpu_lock import SCOPE_VARIABLE, user_of
from .holder_mark import HolderMark
from .identity import Machine, pid_namespace

logger = logging.getLogger(__name__)

FOLDER: Final = Path("/dev/shm")  # noqa: S108 - every user can reach it, and none can remove another user's file
_MOST_BYTES: Final = 16 * 1024 * 1024
_SHORTEST_TO_REWRITE: Final = 256


class RecordedHolder(NamedTuple):
    """A process that holds a GPU under a lease, by the word of the server that granted it. None: it cannot be seen here."""

    uuid: str
    lease_id: str
    process: ProcessId | None


def prefix(scope: str | None = None) -> str:
    """How the names of all records begin; those of tests have a scope."""
    scope = os.environ.get(SCOPE_VARIABLE, "") if scope is None else scope
    return f"gpu-worker-pool.{sha256(scope.encode()).hexdigest()[:8] if scope else 'holders'}."


class HolderRecord:
    """Writes the record of one pool. What cannot be written is said once: the GPUs are granted all the same."""

    def __init__(self, pool_id: str, folder: Path = FOLDER) -> None:
        self.path = folder / f"{prefix()}{pool_id}"
        self._live: dict[str, str] = {}
        self._lines = 0
        self._descriptor: int | None = None
        self._has_failed = False

    def begin(self, granted: Mapping[str, tuple[ProcessId, Iterable[str]]]) -> None:
        """Replace what an earlier server of this pool has left."""
        self.close()
        self.note(granted)

    def note(self, granted: Mapping[str, tuple[ProcessId, Iterable[str]]], ended: Iterable[str] = ()) -> None:
        """Add the leases that were granted to these processes on these GPUs, and take away those that ended."""
        lines = []
        for lease_id, (process, uuids) in granted.items():
            self._live[lease_id] = json.dumps([lease_id, process.pid, process.started, *uuids])
            lines.append(self._live[lease_id])
        lines += [json.dumps([lease_id]) for lease_id in ended if self._live.pop(lease_id, None) is not None]
        if not lines:
            return
        try:
            self._lines += len(lines)
            if self._descriptor is None or self._lines > max(_SHORTEST_TO_REWRITE, 2 * len(self._live)):
                self._rewrite()
            else:
                os.write(self._descriptor, _text(lines))
        except OSError as error:
            self._forget_file()
            if not self._has_failed:
                self._has_failed = True
                text = "the record of the holders, %s, cannot be written (%s): another server would not find them"
                logger.warning(text, self.path, error.strerror or error)

    def close(self) -> None:
        """Leave the file if it names a holder, and remove it otherwise."""
        self._forget_file()
        if not self._live:
            with suppress(OSError):
                self.path.unlink()

    def _rewrite(self) -> None:
        self._forget_file()
        draft = self.path.with_name(f"{self.path.name}~")
        draft.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(draft, flags, 0o644)
        os.fchmod(self._descriptor, 0o644)  # whatever the umask is: other users' servers read it
        os.write(self._descriptor, _text([json.dumps([boot_id(), pid_namespace()]), *self._live.values()]))
        draft.replace(self.path)
        self._lines = len(self._live)

    def _forget_file(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class RecordReader:
    """Reads the records of all other pools on this machine. A file is parsed again only if it has changed."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._machine = Machine.here()
        self._known: dict[Path, tuple[object, list[RecordedHolder]]] = {}
        # The record of this server itself.
        self.own: Path | None = None

    def read(self, uuids: Container[str]) -> Iterator[HolderMark]:
        """The processes that still run and hold one of these GPUs."""
        known, self._known = self._known, {}
        for path in sorted(self._folder.glob(f"{prefix()}*")):
            if path == self.own or path.name.endswith("~"):
                continue
            with suppress(OSError, ValueError, TypeError, IndexError):
                found = path.lstat()
                version = (found.st_ino, found.st_size, found.st_mtime_ns)
                if path not in known or known[path][0] != version:
                    known[path] = version, _parse(path, found)
                self._known[path] = known[path]
        for path, (_, holders) in self._known.items():
            for holder in holders:
                if holder.uuid in uuids and (holder.process is None or self._machine.is_alive(holder.process)):
                    yield HolderMark(holder.uuid, holder.lease_id, f"{_who(holder.process)}, by the record {path}")


def _parse(path: Path, found: os.stat_result) -> list[RecordedHolder]:
    """The holders in a file of any user; none in one that is not a record of this boot."""
    if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
        return []
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        # A last line without its end is still being written.
        first, *lines = file.read(_MOST_BYTES).split(b"\n")[:-1]
    boot, namespace = json.loads(first)
    if boot != boot_id():
        return []
    is_visible = namespace == pid_namespace()
    live: dict[str, list[Any]] = {}
    for line in lines:
        lease_id, *facts = json.loads(line)
        live.pop(str(lease_id), None)
        if facts:
            live[str(lease_id)] = facts
    return [
        RecordedHolder(str(uuid), lease_id, _process(pid, started) if is_visible else None)
        for lease_id, (pid, started, *uuids) in live.items()
        for uuid in uuids
    ]


def _process(pid: object, started: object) -> ProcessId:
    return ProcessId(int(str(pid)), None if started is None else float(str(started)))


def _who(process: ProcessId | None) -> str:
    if process is None:
        return "a process of another container"
    try:
        return f"user {user_of(Path('/proc', str(process.pid)).stat().st_uid)}, pid {process.pid}"
    except OSError:
        return f"pid {process.pid}"


def _text(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
