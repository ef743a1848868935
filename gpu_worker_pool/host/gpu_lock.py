"""One authority per GPU on a machine: a lock on each GPU's UUID that servers of all users meet.

The lock is an abstract Unix socket. The kernel frees it when the process ends, no file can be deleted under it, and a
process that connects learns the holder's user and pid from the kernel. A process in another network namespace (a
container without the host's network) does not see it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import selectors
import socket
import sys
import threading
import weakref
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Final

from .connections import unix_peer
from .users import user_name

logger = logging.getLogger(__name__)

# Separates the servers of tests from each other and from the machine's own.
SCOPE_VARIABLE: Final = "GPU_POOL_LOCK_SCOPE"
_LONGEST_NAME: Final = 100
_ANSWER_BYTES: Final = 512
_ANSWER_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class LockHolder:
    """The process that has a GPU. `user` and `pid` are the kernel's word, and pid 0 if it has none; `url` and `journal` are
    its own, and None if it gave none.
    """

    pid: int
    user: str
    url: str | None
    journal: str | None = None

    def __str__(self) -> str:
        if not self.pid:  # bound, and not listening: not a server
            return (
                "a process of this machine has the lock of this GPU and does not answer, so its user is not known; "
                "`sudo ss -xap | grep gpu-worker-pool` shows it; end it and restart this server"
            )
        who = f"another server on this machine has this GPU (user {self.user}, pid {self.pid})"
        how = f"use it at {self.url}" if self.url else "use that one"
        return f"{who}; {how}, or end it and restart this server"


class GpuLocks:
    """The locks of one server. `take` may wait a moment for another server's answer: not for an event loop.

    A GPU that another server had is not taken later: that server may only be restarting, and its leases go on. A server
    of the same user with the same `journal` is this server's predecessor, which is just ending: its leases are ours.
    """

    def __init__(self, url: str | None = None, scope: str | None = None, *, journal: str | None = None) -> None:
        self.url = url
        self._journal = None if journal is None else hashlib.sha256(journal.encode()).hexdigest()
        self._scope = os.environ.get(SCOPE_VARIABLE, "") if scope is None else scope
        # Two servers that simulate GPUs do not meet, unless a test lets them.
        self.is_for_simulated = bool(self._scope)
        self._held: dict[str, socket.socket] = {}
        self._others: dict[str, LockHolder] = {}
        self._ready = selectors.DefaultSelector()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        _all.add(self)

    def take(self, uuid: str) -> LockHolder | str | None:
        """Take the lock of a GPU, or keep it; the other holder if there is one, or why the system refuses it: then another
        server may have the GPU, so it is not granted.
        """
        if uuid in self._held or self._is_closed or not sys.platform.startswith("linux"):
            return None
        if uuid not in self._others:
            name = _name(self._scope, uuid)
            try:
                lock = _bind(name)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    why = error.strerror or str(error)
                    return f"its lock cannot be taken ({why}): another server may have it; let this server use Unix sockets"
                holder = _ask_holder(name) or LockHolder(0, "unknown", None)
                if self._is_predecessor(holder):
                    return holder
                self._others[uuid] = holder
                logger.warning("GPU %s is not granted here: %s", uuid, holder)
            else:
                lock.settimeout(0)
                self._held[uuid] = lock
                self._ready.register(lock, selectors.EVENT_READ)
                self._start_answering()
        return self._others.get(uuid)

    def close(self) -> None:
        """Give all locks back."""
        self._is_closed = True
        for lock in self._held.values():
            with suppress(KeyError, ValueError, OSError):
                self._ready.unregister(lock)
            lock.close()

    def _is_predecessor(self, holder: LockHolder) -> bool:
        return self._journal is not None and (holder.journal, holder.user) == (self._journal, user_name(os.getuid()))

    def _start_answering(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._answer, name="gpu-locks", daemon=True)
            self._thread.start()

    def _answer(self) -> None:
        while not self._is_closed:
            for key, _ in self._ready.select(timeout=1.0):
                lock = key.fileobj
                if isinstance(lock, socket.socket):
                    with suppress(OSError):
                        caller, _ = lock.accept()
                        with closing(caller):
                            caller.settimeout(0)
                            caller.send(json.dumps({"url": self.url, "journal": self._journal}).encode())


def _bind(name: str) -> socket.socket:
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(name)
        lock.listen(16)
    except OSError:
        lock.close()
        raise
    return lock


def lock_holder(uuid: str, scope: str | None = None) -> LockHolder | None:
    """The server that has a GPU; None if none has. It takes no lock."""
    if not sys.platform.startswith("linux"):
        return None
    return _ask_holder(_name(os.environ.get(SCOPE_VARIABLE, "") if scope is None else scope, uuid))


def _ask_holder(name: str) -> LockHolder | None:
    """Ask the holder of a lock; None where nothing listens there. What cannot be learned of it stays unknown."""
    pid, user, url, journal = 0, "unknown", None, None
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(name)
            pid, uid = unix_peer(connection)
            user = user_name(uid)
            said = json.loads(connection.recv(_ANSWER_BYTES))
            if isinstance(said, dict):
                url, journal = _cleaned(said.get("url")), said.get("journal")
        except ConnectionRefusedError:
            return None
        except (OSError, ValueError):
            pass
    return LockHolder(pid, user, url, journal)


def _cleaned(url: object) -> str | None:
    """The holder's address, if it is one: another user's process may say anything."""
    if not isinstance(url, str) or len(url) > 200 or not url.startswith(("http://", "https://")):
        return None
    return url if url.isascii() and url.isprintable() and " " not in url else None


def _name(scope: str, uuid: str) -> str:
    name = "/".join(("gpu-worker-pool", *filter(None, (scope,)), "gpu", uuid))
    if len(name.encode()) > _LONGEST_NAME:
        name = f"gpu-worker-pool/gpu/{hashlib.sha256(name.encode()).hexdigest()}"
    return f"\0{name}"


_all: weakref.WeakSet[GpuLocks] = weakref.WeakSet()


def _close_in_child() -> None:
    # A fork shares the sockets; the lock must end with this server, whatever its children do.
    for locks in list(_all):
        locks._is_closed = True  # noqa: SLF001 - of this module
        for lock in locks._held.values():  # noqa: SLF001
            lock.close()


os.register_at_fork(after_in_child=_close_in_child)
