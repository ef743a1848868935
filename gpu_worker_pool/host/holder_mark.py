"""Marks of the processes that hold GPUs of this machine: an abstract Unix socket for each GPU and lease.

A server may crash while the holders of its leases go on. A server that is started then, by another user or on another
state directory, finds no lease of theirs in its journal; it finds their marks. The kernel removes a mark with its process.
"""

from __future__ import annotations

import os
import socket
import sys
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from .gpu_lock import SCOPE_VARIABLE, ask_holder

_SOCKETS: Final = Path("/proc/net/unix")
_FOLDER: Final = "gpu-worker-pool/holder"


class HolderMark(NamedTuple):
    """A process holds a GPU under a lease. `who` names it for people."""

    uuid: str
    lease_id: str
    who: str


def mark_names(lease_id: str, uuids: Iterable[str]) -> list[str]:
    """The names of the sockets to bind for a lease on these GPUs."""
    return [f"\0{_folder()}/{uuid}/{lease_id}" for uuid in uuids]


class HolderMarks:
    """The marks of this process. A fork does not keep them: the child does not hold the lease."""

    def __init__(self) -> None:
        self._sockets: dict[str, list[socket.socket]] = {}
        _all.add(self)

    def add(self, lease_id: str, uuids: Iterable[str]) -> None:
        if sys.platform.startswith("linux") and lease_id not in self._sockets:
            self._sockets[lease_id] = [bound for name in mark_names(lease_id, uuids) if (bound := _bind(name))]

    def drop(self, lease_id: str) -> None:
        for bound in self._sockets.pop(lease_id, ()):
            bound.close()

    def close(self) -> None:
        for lease_id in list(self._sockets):
            self.drop(lease_id)


class MarkReader:
    """Reads the marks on this machine. It asks the kernel once for each mark whose it is."""

    def __init__(self) -> None:
        self._known: dict[str, HolderMark] = {}

    def read(self) -> tuple[HolderMark, ...]:
        start = f" @{_folder()}/"
        try:
            sockets = _SOCKETS.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ()
        found: dict[str, HolderMark] = {}
        # A machine may have thousands of sockets, and this is read after every release.
        for part in sockets.split(start)[1:]:
            rest = part.partition("\n")[0]
            uuid, _, lease_id = rest.partition("/")
            if uuid and lease_id:
                found[rest] = self._known.get(rest) or HolderMark(uuid, lease_id, _who(f"\0{start[2:]}{rest}"))
        self._known = found
        return tuple(found.values())


def _who(name: str) -> str:
    holder = ask_holder(name, needs_answer=False)
    return f"user {holder.user}, pid {holder.pid}"


def _folder() -> str:
    scope = os.environ.get(SCOPE_VARIABLE)
    return f"{_FOLDER}/{scope}" if scope else _FOLDER


def _bind(name: str) -> socket.socket | None:
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(name)
        mark.listen(64)
    except OSError:  # it is there already, or the lease's id is too long for a name
        mark.close()
        return None
    return mark


_all: weakref.WeakSet[HolderMarks] = weakref.WeakSet()


def _drop_in_child() -> None:
    for marks in list(_all):
        with suppress(OSError):
            marks.close()


os.register_at_fork(after_in_child=_drop_in_child)
