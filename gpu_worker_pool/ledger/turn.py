"""The work of one turn of the event loop, bounded: while a turn lasts, no caller is answered and no heartbeat is taken.

What is left is done in the next turns, in the same order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence

from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.core.model.state import PoolState

from .fair_queue import FairQueue, UnheardHeartbeats, WaitingCall

# Commands of callers, passes over the queue (one grant each, if GPUs are shared) and callers that are answered.
MOST_COMMANDS = 12
IDS_PER_COMMAND = 100  # so many ids in a heartbeat count as a command
MOST_PASSES = 24
MOST_ANSWERED = 64
# Processes and leases on the GPUs whose readings are taken in.
MOST_ON_GPUS = 100

Caller = asyncio.Future[None]


class Turn:
    """What is left of the present turn, and the callers that wait for a later one."""

    def __init__(self) -> None:
        self.passes_left = MOST_PASSES
        self._commands_left = MOST_COMMANDS
        self._is_counted = False
        self._held_back = FairQueue()
        self._unheard = UnheardHeartbeats()
        self._to_answer: deque[Caller] = deque()

    @property
    def heard_until(self) -> float:
        """All heartbeats that arrived before this time are carried out."""
        return self._unheard.since

    async def admit(self, weight: int, caller: Hashable = None, arrived_at: float | None = None) -> None:
        """Wait for a turn that has time for a command of this weight. Callers take turns; the commands of one are carried
        out in order, light heartbeats first. TooManyCalls if too many of this caller wait.

        `arrived_at` is the time at which a heartbeat arrived. It must be carried out at once after this returns.
        """
        self._count()
        if not self._held_back and self._commands_left > 0:
            self._commands_left -= weight
            return
        call = WaitingCall(weight, arrived_at, asyncio.get_running_loop().create_future())
        self._held_back.join(caller, call)
        self._unheard.add(call)
        try:
            await call.turn
        finally:
            self._unheard.discard(call)

    def spend_passes(self, passes: int) -> None:
        self.passes_left -= passes
        self._count()

    def answer(self, callers: Iterable[Caller]) -> None:
        """Wake some of the callers, and the others in the next turns."""
        is_under_way = bool(self._to_answer)
        self._to_answer += callers
        if not is_under_way:
            self._answer_some()

    def _answer_some(self) -> None:
        for _ in range(min(len(self._to_answer), MOST_ANSWERED)):
            caller = self._to_answer.popleft()
            if not caller.done():
                caller.set_result(None)
        if self._to_answer:
            asyncio.get_running_loop().call_soon(self._answer_some)

    def _count(self) -> None:
        if not self._is_counted:
            self._is_counted = True
            asyncio.get_running_loop().call_soon(self._start)

    def _start(self) -> None:
        self._is_counted = False
        self._commands_left, self.passes_left = MOST_COMMANDS, MOST_PASSES
        while self._held_back and self._commands_left > 0:
            call = self._held_back.pop()
            if not call.turn.done():  # else the caller has left
                call.turn.set_result(None)
                self._commands_left -= call.weight
        if self._held_back:
            self._count()


class Waiters:
    """The callers that wait for something to happen to a lease."""

    def __init__(self) -> None:
        # Ordered sets: a caller leaves the lines of a thousand leases without a search in each.
        self._by_lease: dict[str, dict[Caller, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_lease.values()))

    async def wait(self, lease_ids: Sequence[str], timeout_s: float) -> None:
        """Wait until something happens to one of these leases, or until the timeout."""
        waiter: Caller = asyncio.get_running_loop().create_future()
        for lease_id in lease_ids:
            self._by_lease.setdefault(lease_id, {})[waiter] = None
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            pass
        finally:
            for lease_id in lease_ids:
                waiters = self._by_lease.get(lease_id)
                if waiters is not None:
                    waiters.pop(waiter, None)
                    if not waiters:
                        del self._by_lease[lease_id]

    def pop(self, lease_id: str) -> list[Caller]:
        return list(self._by_lease.pop(lease_id, ()))

    def release_all(self) -> None:
        for waiters in self._by_lease.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)


def in_pieces(state: PoolState, readings: Iterable[Reading]) -> Iterator[tuple[Reading, ...]]:
    """The readings in order, in pieces that one turn has time for. If some of the GPUs are not known yet, all are one
    piece: a request that only the last of them could serve must not be refused in between.
    """
    readings = tuple(readings)
    if not all(reading.gpu.key in state.slots for reading in readings):
        yield readings
        return
    piece: list[Reading] = []
    weight = 0
    for reading in readings:
        slot = state.slots.get(reading.gpu.key)
        piece.append(reading)
        weight += 1 + len(reading.processes or ()) + (len(slot.occupants) if slot else 0)
        if weight >= MOST_ON_GPUS:
            yield tuple(piece)
            piece, weight = [], 0
    if piece:
        yield tuple(piece)
