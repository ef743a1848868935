"""The processes of this machine, as /proc shows them: those on a GPU, and those that hold leases."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Self

from gpu_worker_pool.core.model.gpu import GpuProcess, ProcessId
from gpu_worker_pool.core.model.request import Holder

from .clock import boot_id
from .users import user_name

PROC = Path("/proc")
HOSTS = Path("/etc/hosts")
# A directory service may take its time for a name, and every reading needs some.
_user_name = lru_cache(maxsize=1024)(user_name)
MOST_ANCESTORS = 64

# Positions in /proc/PID/stat, counted from the first field after the name, which is field 3 in proc(5).
_STATE, _PARENT, _THREADS, _STARTED = 0, 1, 17, 19
_STAT_BYTES = 4096
_ENDED = frozenset({b"Z", b"X", b"x"})


class ProcessFacts(NamedTuple):
    """A process in /proc; its start time is in clock ticks since the boot."""

    id: ProcessId
    parent_pid: int
    name: str
    has_ended: bool


def read_process(proc: Path, pid: int) -> ProcessFacts | None:
    """Read one process, quickly: it is done for every lease. None where `proc` does not show it."""
    if pid <= 0:
        return None
    try:
        file = os.open(f"{proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            stat = os.read(file, _STAT_BYTES)
        finally:
            os.close(file)
        # The name is in parentheses, and may itself hold spaces and parentheses.
        before, _, after = stat.rpartition(b")")
        name, fields = before.partition(b"(")[2].decode(errors="replace"), after.split(None, _STARTED + 1)
        # A process whose first thread has returned appears as a zombie while other threads still use the GPU.
        has_ended = fields[_STATE] in _ENDED and int(fields[_THREADS]) <= 1
        return ProcessFacts(ProcessId(pid, float(fields[_STARTED])), int(fields[_PARENT]), name, has_ended)
    except (OSError, ValueError, IndexError):
        return None


def read_uids(proc: Path, pid: int) -> tuple[int, ...]:
    """The real and the effective user of a process; none where `proc` does not show it.

    The folder of a process may belong to root, also if another user runs it.
    """
    try:
        status = (proc / str(pid) / "status").read_bytes()
        return tuple(map(int, status.partition(b"\nUid:")[2].split(None, 2)[:2]))
    except (OSError, ValueError):
        return ()


class ProcessTable:
    """The processes at one moment. Each is read once, so every reading needs a new table.

    What /proc does not show (the process is gone, in another pid namespace or hidden by `hidepid`, or there is no
    /proc) is unknown: None, or no ancestors.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._facts: dict[int, ProcessFacts | None] = {}

    def facts(self, pid: int) -> ProcessFacts | None:
        if pid not in self._facts:
            self._facts[pid] = read_process(self._proc, pid)
        return self._facts[pid]

    def started(self, pid: int) -> float | None:
        facts = self.facts(pid)
        return facts.id.started if facts else None

    def name(self, pid: int) -> str | None:
        """The name that `ps -o comm` shows."""
        facts = self.facts(pid)
        return facts.name if facts else None

    def ancestors(self, pid: int) -> tuple[ProcessId, ...]:
        """The ancestors, nearest first, at most MOST_ANCESTORS."""
        found: list[ProcessId] = []
        child = self.facts(pid)
        while child and len(found) < MOST_ANCESTORS:
            parent = self.facts(child.parent_pid)
            # A "parent" that is younger than its child has taken over the pid of the real parent.
            if parent is None or _is_younger(parent.id, child.id):
                break
            found.append(parent.id)
            child = parent
        return tuple(found)

    def user(self, pid: int) -> str | None:
        """The Unix user that runs it."""
        try:
            return _user_name((self._proc / str(pid)).stat().st_uid)
        except OSError:
            return None

    def gpu_process(self, pid: int, memory_mb: float | None) -> GpuProcess:
        return GpuProcess(
            id=ProcessId(pid, self.started(pid)),
            memory_mb=memory_mb,
            name=self.name(pid),
            ancestors=self.ancestors(pid),
            user=self.user(pid),
        )


def _is_younger(one: ProcessId, other: ProcessId) -> bool:
    return one.started is not None and other.started is not None and one.started > other.started


# --- which clients are processes of this machine ------------------------------------------------------------------------


class NoSuchProcess(Exception):  # noqa: N818 - a fact about the client, not a fault
    """The client claims to be a process of this machine that does not exist."""

    def __init__(self, pid: int) -> None:
        super().__init__(f"pid {pid} is not running on this machine; send the pid of a running process, or none")
        self.pid = pid


class ForeignProcess(Exception):  # noqa: N818 - a fact about the client, not a fault
    """The client names a process of another user as the holder."""

    def __init__(self, process: ProcessId, uid: int) -> None:
        # By its number: the directory of users may take long for a name, and the event loop must not wait for that.
        user = "root" if uid == 0 else f"another user (uid {uid})"
        super().__init__(
            f"pid {process.pid} is a process of {user}; the holder must be a process of the user who requests the lease. "
            "Only an administrator may name another"
        )
        self.process = process


@dataclass(frozen=True, slots=True)
class Machine:
    """The server's machine, with all names that a client may know it by.

    `host_names` are in lower case. `proc` is None if /proc does not show processes by the pids of this process's
    namespace.
    """

    host_names: frozenset[str]
    boot_id: str
    pid_namespace: str | None
    proc: Path | None = PROC

    @classmethod
    def here(cls) -> Self:
        return cls(_host_names(socket.gethostname()), boot_id(), pid_namespace(), own_proc())

    def local_process(
        self,
        holder: Holder,
        *,
        uid: int | None,
        may_name_any: bool = False,
        is_watched: Callable[[ProcessId], bool] = lambda _: False,
    ) -> ProcessId | None:
        """The holder's process, if it is on this machine and the caller may name it; None if it is elsewhere or unknown.

        `uid` is the caller's Unix user on this machine, as the kernel knows it. A caller without one is elsewhere, whatever
        it says: every user can read what identifies this machine. With `may_name_any`, the process may be another user's.
        A process whose user is hidden is nobody's. Raises NoSuchProcess if the process is on this machine and does not run,
        and ForeignProcess if another user has it. A process that `is_watched` is known to exist, and not looked up.
        """
        if uid is None or holder.pid is None or not self._is_home_of(holder):
            return None
        named = ProcessId(holder.pid, None if holder.pid_started is None else float(holder.pid_started))
        is_known = named.started is not None and is_watched(named)
        found = named if is_known else self._find_running(named)
        if found is None:
            raise NoSuchProcess(holder.pid)
        if may_name_any:
            return found
        uids = read_uids(self.proc, found.pid) if self.proc else ()
        if uids and uid not in uids:
            raise ForeignProcess(found, uids[0])
        return found if uids else None

    def is_alive(self, process: ProcessId) -> bool:
        """Whether this very process runs. A process that cannot be checked counts as alive."""
        return self._find_running(process) is not None

    def _find_running(self, process: ProcessId) -> ProcessId | None:
        """This very process with its start time, if that can be read; None if it does not run."""
        seen = read_process(self.proc, process.pid) if self.proc else None
        if seen is None:
            return process if _exists(process.pid) else None
        return None if seen.has_ended or not process.is_same(seen.id) else seen.id

    def _is_home_of(self, holder: Holder) -> bool:
        # Containers share the boot, and copied images share the host name, so any one difference decides.
        if holder.boot_id is not None and holder.boot_id != self.boot_id:
            return False
        if holder.pid_namespace is not None and holder.pid_namespace != self.pid_namespace:
            return False
        if holder.boot_id is not None and holder.pid_namespace is not None:
            return True
        return holder.host is not None and _plain(holder.host) in self.host_names


def _exists(pid: int) -> bool:
    """Whether the process exists, without /proc. A hidden process cannot be signalled, yet exists."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def own_proc() -> Path | None:
    """/proc, if it shows processes by the pids of this process's namespace: by another one's they mean others."""
    try:
        return PROC if (PROC / "self").readlink() == Path(str(os.getpid())) else None
    except OSError:
        return None


def pid_namespace() -> str | None:
    try:
        return str((PROC / "self/ns/pid").readlink())
    except OSError:
        return None


def _host_names(host: str, hosts: Path = HOSTS) -> frozenset[str]:
    """The host's name, long and short, and its aliases in the hosts file, where `hostname -f` looks first.

    The name server is not asked: it may be slow or down, and the server has to start anyway.
    """
    own = {_plain(host), _plain(host).partition(".")[0]}
    names = set(own)
    try:
        lines = hosts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        beside = {_plain(name) for name in line.partition("#")[0].split()[1:]}
        # localhost names every machine, so it identifies none.
        if own & beside:
            names |= {name for name in beside if not name.startswith("localhost")}
    return frozenset(names - {""})


def _plain(host: str) -> str:
    return host.strip().rstrip(".").lower()
