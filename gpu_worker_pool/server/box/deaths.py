"""The holders of a box's leases on their machine: the death of a process is reported at once, and simulated GPUs are used."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.gpus.simulated import SimulatedHolder, SimulatedProbe
from gpu_worker_pool.host.connections import is_scarce
from gpu_worker_pool.host.processes import Machine

logger = logging.getLogger(__name__)

POLL_S = 0.25

# A holder without a process of this machine gets a pid that no process can have.
FIRST_SIMULATED_PID = 10_000_000
# The process of a holder, the fence of its lease, and the memory that it asked for.
User = tuple[ProcessId | None, int, float | None]


def open_pidfd(pid: int) -> int:
    """Open a descriptor that becomes readable when the process ends, reaped or not."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    descriptor = os.pidfd_open(pid)
    if is_scarce(descriptor):
        # Watching works without a descriptor; accepting a connection does not.
        os.close(descriptor)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return descriptor


@dataclass(slots=True, eq=False)
class _Watched:
    """A process and its leases. Without a descriptor, it is polled or was found dead."""

    process: ProcessId
    # A dict, because leases are reported in the order in which they came.
    leases: dict[str, None] = field(default_factory=dict)
    descriptor: int | None = None


class DeathWatch:
    """Calls `on_death` once for every lease of a process that has died: in the loop's thread, and never within `watch`.

    The kernel reports a death by a descriptor. If it cannot (it is too old or forbids it, or descriptors are scarce),
    one timer polls those processes every POLL_S. A stopped process is alive, a zombie is dead. `len` is the number of
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
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._by_process)

    def __repr__(self) -> str:
        return f"<DeathWatch {len(self)} processes ({len(self._polled)} polled), {len(self._by_lease)} leases>"

    def watch(self, process: ProcessId, lease_id: str) -> None:
        """Report this lease when the process dies, or soon if it is dead already. Repeating a call changes nothing;
        another process for the same lease replaces the first. After `close` nothing is watched.
        """
        earlier = self._by_lease.get(lease_id)
        if self._is_closed or (earlier is not None and earlier.process == process):
            return
        self.forget(lease_id)
        known = self._by_process.get(process)
        watched = self._by_process[process] = self._by_lease[lease_id] = known or _Watched(process)
        watched.leases[lease_id] = None
        if known is None:
            self._start(watched)

    def forget(self, lease_id: str) -> None:
        """Never report this lease. A lease that is not watched is ignored."""
        watched = self._by_lease.pop(lease_id, None)
        if watched is None:
            return
        del watched.leases[lease_id]
        if not watched.leases:
            self._remove(watched)

    def is_alive(self, process: ProcessId) -> bool:
        """Whether the process runs at this moment; with a descriptor this is quick."""
        watched = self._by_process.get(process)
        if watched is None or watched.descriptor is None:
            return self._machine.is_alive(process)
        poll = select.poll()
        poll.register(watched.descriptor, select.POLLIN)
        return not poll.poll(0)

    def is_watched(self, process: ProcessId) -> bool:
        """Whether the process has a descriptor, and its death was not reported yet."""
        watched = self._by_process.get(process)
        return watched is not None and watched.descriptor is not None

    def close(self) -> None:
        """Close all descriptors and the timer; nothing is reported from now on."""
        self._is_closed = True
        self._by_lease.clear()
        for watched in list(self._by_process.values()):
            self._remove(watched)
        if self._timer is not None:
            self._timer.cancel()

    def _start(self, watched: _Watched) -> None:
        try:
            is_alive = self._attach(watched)
        except OSError:
            if self._timer is None:
                self._timer = self._loop.call_later(POLL_S, self._poll_processes)
        else:
            if not is_alive:
                self._ended(watched)

    def _attach(self, watched: _Watched) -> bool:
        """Let the kernel report the death; False if the process is dead, OSError if the kernel cannot."""
        process = watched.process
        try:
            descriptor = self._open_pidfd(process.pid)
        except (ProcessLookupError, OverflowError):
            return False
        # The descriptor must come first: it pins one process. Checked before, the pid could pass to another process in
        # between.
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

    def _poll_processes(self) -> None:
        self._timer = None
        for watched in self._polled:
            if not self._machine.is_alive(watched.process):
                self._ended(watched)
        if self._polled:
            self._timer = self._loop.call_later(POLL_S, self._poll_processes)

    @property
    def _polled(self) -> list[_Watched]:
        return [watched for watched in self._by_process.values() if watched.descriptor is None]

    def _ended(self, watched: _Watched) -> None:
        self._remove(watched)
        for lease_id in watched.leases:
            # Later, as this may run within `watch`; and one by one, so that a report that fails does not stop the others.
            self._loop.call_soon(self._report, lease_id, watched)

    def _report(self, lease_id: str, watched: _Watched) -> None:
        # Meanwhile the lease may have been forgotten, or got another process.
        if self._by_lease.get(lease_id) is watched:
            del self._by_lease[lease_id]
            self._on_death(lease_id)

    def _remove(self, watched: _Watched) -> None:
        # If it was removed before, another watch on the same process may exist by now, and must go on.
        if self._by_process.get(watched.process) is not watched:
            return
        del self._by_process[watched.process]
        if watched.descriptor is not None:
            self._loop.remove_reader(watched.descriptor)
            os.close(watched.descriptor)
            watched.descriptor = None


class Holders(DeathWatch):
    """`on_death` is called with the id of a lease whose process has died. Made in the event loop."""

    def __init__(self, on_death: Callable[[str], None], simulated: SimulatedProbe | None) -> None:
        def report(lease_id: str) -> None:
            logger.info("the holder of lease %s is dead", lease_id)
            on_death(lease_id)

        super().__init__(report, asyncio.get_running_loop())
        self._simulated = simulated

    def use(self, users: Mapping[str, Iterable[User]]) -> None:
        """Set all that use these GPUs, by UUID. Real hardware shows by itself who does."""
        if self._simulated is None:
            return
        for uuid, each in users.items():
            processes = [(process or ProcessId(FIRST_SIMULATED_PID + fence, None), mb) for process, fence, mb in each]
            try:
                self._simulated.occupy(uuid, [SimulatedHolder(*process, mb) for process, mb in processes])
            except ValueError:
                logger.debug("there is no simulated GPU %s any more", uuid)
