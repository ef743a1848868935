"""The machine of the server: which clients are its processes, and whether they are alive."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.core.model.request import Holder

from .clock import boot_id
from .processes import PROC, read_process, read_uids

HOSTS = Path("/etc/hosts")


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
