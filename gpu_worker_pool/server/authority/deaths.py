"""Tells at once when a process that holds a lease has died."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.host.identity import Machine
from gpu_worker_pool.host.limits import is_scarce

POLL_S = 0.25
# Looked at in one go; more than these would keep the event loop from its requests for milliseconds.
MOST_AT_ONCE = 200
# Processes without a lease that are kept in view: most that gave one back ask again, and a descriptor costs time to get.
MOST_IDLE = 64

_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC})


def open_pidfd(pid: int) -> int:
    """A descriptor that is readable as soon as the process has ended, reaped or not."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    descriptor = os.pidfd_open(pid)
    if is_scarce(descriptor):
        # Watching can be done without one; taking a connection cannot.
        os.close(descriptor)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return descriptor


@dataclass(slots=True, eq=False)
class _Watched:
    """A process and the leases that end with it; without a descriptor it is polled, or was found dead."""

    process: ProcessId
    # A dict for its order: the leases are reported as they came.
    leases: dict[str, None] = field(default_factory=dict)
    descriptor: int | None = None


class DeathWatch:
    """Calls `on_death` once for every lease of a process that has died, in the loop's thread, never from in `watch`.

    The kernel says so where it can; where it cannot (it is too old or forbids it, or descriptors are short), one timer
    looks at those processes every POLL_S. A stopped process is alive, a zombie is dead. Its length is the number of
    processes watched.
    """

    def __init__(
        self,
        on_death: Callable[[str], None],
        loop: asyncio.AbstractEventLoop,
        *,
        machine: Machine | None = None,
        open_pidfd: Callable[[int], int] = open_pidfd,
    ) -> None:
        self._on_death = on_death
        self._loop = loop
        self._machine = machine or Machine.here()
        self._open_pidfd = open_pidfd
        self._by_lease: dict[str, _Watched] = {}
        self._by_process: dict[ProcessId, _Watched] = {}
        # Those who have no lease at present, the one without for longest first; all of them have a descriptor.
        self._idle: dict[ProcessId, _Watched] = {}
        # Whether a descriptor may still be had for it; the one not looked at for longest comes first.
        self._polled: dict[ProcessId, bool] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._by_process)

    def __repr__(self) -> str:
        return f"<DeathWatch {len(self)} processes ({len(self._polled)} polled), {len(self._by_lease)} leases>"

    def watch(self, process: ProcessId, lease_id: str) -> None:
        """Report this lease when the process dies, or soon if it is dead already. The same again changes nothing;
        another process for the same lease takes the place of the first. After `close` nothing is watched.
        """
        earlier = self._by_lease.get(lease_id)
        if self._is_closed or (earlier is not None and earlier.process == process):
            return
        self.forget(lease_id)
        watched = self._by_process.get(process) or self._idle.pop(process, None)
        is_new = watched is None
        if watched is None:
            watched = _Watched(process)
        self._by_process[process] = watched
        watched.leases[lease_id] = None
        self._by_lease[lease_id] = watched
        if is_new:
            self._begin(watched)

    def forget(self, lease_id: str) -> None:
        """Never report this lease; one that is not watched is no error."""
        watched = self._by_lease.pop(lease_id, None)
        if watched is None:
            return
        del watched.leases[lease_id]
        if watched.leases or self._by_process.get(watched.process) is not watched:
            return
        if watched.descriptor is None:
            self._let_go(watched)
            return
        del self._by_process[watched.process]
        self._idle[watched.process] = watched
        if len(self._idle) > MOST_IDLE:
            self._let_go(next(iter(self._idle.values())))

    def is_alive(self, process: ProcessId) -> bool:
        """Whether it runs at this moment; quick where the kernel would tell of its death, told or not."""
        watched = self._by_process.get(process) or self._idle.get(process)
        if watched is None or watched.descriptor is None:
            return self._machine.is_alive(process)
        poll = select.poll()
        poll.register(watched.descriptor, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Give back all descriptors and the timer; nothing is reported from now on."""
        self._is_closed = True
        self._by_lease.clear()
        for watched in [*self._by_process.values(), *self._idle.values()]:
            self._let_go(watched)

    def _begin(self, watched: _Watched) -> None:
        try:
            is_alive = self._attach(watched)
        except OSError as error:
            self._poll(watched.process, may_attach=error.errno in _SHORTAGES)
        else:
            if not is_alive:
                self._ended(watched)

    def _attach(self, watched: _Watched) -> bool:
        """Have the kernel tell of its death; False if it is dead. Raises OSError where the kernel does not do it."""
        process = watched.process
        try:
            descriptor = self._open_pidfd(process.pid)
        except (ProcessLookupError, OverflowError):
            return False
        # Only now that the descriptor holds on to one process can it be asked whether that is still the right one: the
        # other way round, the pid could be taken over in between.
        if not self._machine.is_alive(process):
            os.close(descriptor)
            return False
        try:
            self._loop.add_reader(descriptor, self._ended, watched)
        except OSError:
            os.close(descriptor)
            raise
        watched.descriptor = descriptor
        return True

    def _poll(self, process: ProcessId, *, may_attach: bool) -> None:
        self._polled[process] = may_attach
        if self._timer is None:
            self._set_timer()

    def _set_timer(self) -> None:
        # So that each is seen every POLL_S, however many looks that takes.
        delay_s = POLL_S * min(1.0, MOST_AT_ONCE / len(self._polled))
        self._timer = self._loop.call_later(delay_s, self._poll_processes)

    def _poll_processes(self) -> None:
        self._timer = None
        is_short = False
        for process in list(islice(self._polled, MOST_AT_ONCE)):
            watched = self._by_process[process]
            may_attach = self._polled.pop(process)
            is_alive = self._machine.is_alive(process)
            if is_alive and may_attach and not is_short:
                try:
                    is_alive = self._attach(watched)
                except OSError:
                    # As before, so the next ones need not try in this look.
                    is_short = True
            if not is_alive:
                self._ended(watched)
            elif watched.descriptor is None:
                self._polled[process] = may_attach
        if self._polled:
            self._set_timer()

    def _ended(self, watched: _Watched) -> None:
        self._let_go(watched)
        for lease_id in watched.leases:
            # Soon, as this may be from in `watch`; and each on its own, so that one whose report fails does not keep the
            # others from theirs.
            self._loop.call_soon(self._report, lease_id, watched)

    def _report(self, lease_id: str, watched: _Watched) -> None:
        # It may have been forgotten meanwhile, or now be held by another process.
        if self._by_lease.get(lease_id) is watched:
            del self._by_lease[lease_id]
            self._on_death(lease_id)

    def _let_go(self, watched: _Watched) -> None:
        # If it was let go before, there may by now be another watch on the same process, which must go on.
        for known in (self._by_process, self._idle):
            if known.get(watched.process) is watched:
                del known[watched.process]
                break
        else:
            return
        if watched.descriptor is not None:
            self._loop.remove_reader(watched.descriptor)
            os.close(watched.descriptor)
            watched.descriptor = None
        self._polled.pop(watched.process, None)
        if not self._polled and self._timer is not None:
            self._timer.cancel()
            self._timer = None
