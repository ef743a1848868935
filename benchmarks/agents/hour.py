"""Some time of a fleet, in virtual time: the machines of the leader and of all boxes, with no I/O between them.

Clients request and release all the time, boxes lose their connection, and half-way the leader is replaced. Every box
checks that no GPU is granted twice. Only the processor time of the leader's part is counted; a real leader also has its
sockets and its database.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from benchmarks.shared.crowded_pool import SETTINGS
from benchmarks.shared.results import Results, duration
from gpu_worker_pool.core.decider.step import step
from gpu_worker_pool.core.fleet.box_actions import BoxAction, Close, Confirmed, Do, Tell
from gpu_worker_pool.core.fleet.boxes import Boxes
from gpu_worker_pool.core.fleet.custody import Custody
from gpu_worker_pool.core.fleet.custody_actions import CloseLink, CustodyAction, Drop, Keep, LookNow, NoteOver, Send
from gpu_worker_pool.core.fleet.messages import AgentMessage, LeaderMessage
from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.request import Holder, Request, Wishes
from gpu_worker_pool.core.model.state import PoolState
from gpu_worker_pool.server.box.snapshot import as_installed
from gpu_worker_pool.server.serving import collect_garbage_seldom

from .boxes import GPUS_A_BOX, readings_of

SEED = 1
OWNERS = 50
TTL_S = 7200.0
# Most want one GPU; a lease lasts for minutes.
GPUS = (1, 1, 1, 1, 1, 1, 2, 2, 4, 8)
HELD_S = (60.0, 1800.0)
# So often a box loses its connection, for so long.
BREAK_EVERY_S, BREAK_S = 30, 10
# The leader tells the boxes the time part by part. So long after a second began, it has told all.
HEARTBEATS_S = 0.5


@dataclass(frozen=True)
class Effort:
    gpus: int
    waiters: int
    seconds: int


QUICK = Effort(gpus=80, waiters=40, seconds=120)
WHOLE = Effort(gpus=10_000, waiters=10_000, seconds=300)


class VirtualBox:
    """A box: it looks once a second, and always sees idle GPUs. The box's clock is ahead of the pool's."""

    def __init__(self, number: int, say: Callable[[VirtualBox, AgentMessage], None]) -> None:
        self.node = f"box{number:05}"
        self.session: int | None = None
        self._say = say
        self._readings = readings_of(self.node)
        self._custody = Custody(self.node, f"machine-{number}", "boot", 0.0)
        self._holder: dict[str, str] = {}

    def join(self, session: int) -> None:
        self.session = session
        installed = tuple(map(as_installed, self._readings))
        self._say(self, self._custody.announce(f"http://{self.node}", "1", False, installed))  # noqa: FBT003

    def part(self) -> None:
        self.session = None
        self._custody.disconnected()

    def take(self, message: LeaderMessage, now: float) -> None:
        self._carry_out(self._custody.take(message, now), now)

    def look(self, now: float) -> None:
        report = self._custody.report(self._readings, now)
        if report is not None:
            self._say(self, report)

    def tick(self, now: float) -> None:
        self._carry_out(self._custody.tick(now), now)

    def _carry_out(self, actions: Sequence[CustodyAction], now: float) -> None:
        for action in actions:
            match action:
                case Send(message=message):
                    self._say(self, message)
                case LookNow():
                    self.look(now)
                case Keep(lease=lease):
                    for gpu in lease.gpus:
                        assert self._holder.setdefault(gpu, lease.id) == lease.id, f"{gpu} was granted twice"
                case Drop(lease_id=lease_id):
                    self._holder = {gpu: holder for gpu, holder in self._holder.items() if holder != lease_id}
                case NoteOver() | CloseLink():
                    raise AssertionError(f"{self.node} did what it should not: {action}")

    @property
    def held(self) -> int:
        return len(self._holder)


class VirtualFleet:
    def __init__(self, effort: Effort) -> None:
        self._effort = effort
        self._rng = random.Random(SEED)
        self._now = 0.0
        self._sessions, self._ids = count(1), count(1)
        self._state = PoolState(SETTINGS)
        self._to_leader: deque[tuple[int, AgentMessage]] = deque()
        self._to_boxes: deque[tuple[int, LeaderMessage]] = deque()
        self._ends: list[tuple[float, str]] = []
        self._by_session: dict[int, VirtualBox] = {}
        self._away: deque[tuple[float, VirtualBox]] = deque()
        self.cpu_s = 0.0
        self.longest_s: dict[str, float] = {}
        self.grants = self.messages = 0
        self.boxes = [VirtualBox(number, self._say) for number in range(effort.gpus // GPUS_A_BOX)]
        self._epoch = 0
        self._lead()

    def _lead(self) -> None:
        """A new leader takes over; all boxes come to it."""
        self._epoch += 1
        self._leader = Boxes(self._epoch, "pool", lambda: f"key-{next(self._ids)}")
        self._by_session.clear()
        self._timed("a take-over", lambda: self._do(cmd.TakeOver(self._epoch, "boot", 0.0, 0.0)))
        for box in self.boxes:
            if box.session is not None:
                box.part()
            self._join(box)
        self._settle()

    def _join(self, box: VirtualBox) -> None:
        session = next(self._sessions)
        self._by_session[session] = box
        box.join(session)

    def _say(self, box: VirtualBox, message: AgentMessage) -> None:
        assert box.session is not None
        self._to_leader.append((box.session, message))

    # The leader

    def _timed(self, what: str, work: Callable[[], None]) -> None:
        began = time.thread_time()
        work()
        took_s = time.thread_time() - began
        self.cpu_s += took_s
        self.longest_s[what] = max(self.longest_s.get(what, 0.0), took_s)

    def _do(self, command: cmd.Command) -> None:
        events = step(self._state, command, self._now)
        self.grants += sum(isinstance(event, ev.LeaseGranted) for event in events)
        self._carry_out(self._leader.written(events, self._state, self._now))

    def _carry_out(self, actions: Iterable[BoxAction]) -> None:
        for action in actions:
            match action:
                case Tell(session=session, message=message):
                    self._to_boxes.append((session, message))
                case Do(command=command):
                    self._do(command)
                case Confirmed(lease_id=lease_id):
                    heapq.heappush(self._ends, (self._now + self._rng.uniform(*HELD_S), lease_id))
                case Close(why=why):
                    raise AssertionError(f"the leader closed a connection: {why}")

    def _hear(self) -> None:
        session, message = self._to_leader.popleft()
        self._carry_out(self._leader.receive(session, message, self._state, self._now))

    def _tell_time(self, at: float) -> None:
        self._carry_out(self._leader.tick(self._state, at))

    def _settle(self) -> None:
        """Pass on all messages, until there are none."""
        while self._to_leader or self._to_boxes:
            while self._to_boxes:
                session, message = self._to_boxes.popleft()
                if (box := self._by_session.get(session)) is not None:
                    box.take(message, self._now)
            self.messages += len(self._to_leader)
            while self._to_leader:
                self._timed(f"a message: {type(self._to_leader[0][1]).__name__}", self._hear)

    # The clients

    def _request(self) -> None:
        number = next(self._ids)
        wishes = Wishes(gpus=self._rng.choice(GPUS))
        request = Request(wishes, Holder(owner=f"owner-{number % OWNERS}"), ttl_s=TTL_S)
        self._timed("a request", lambda: self._do(cmd.RequestLease(f"lease-{number}", request)))

    def _release(self, lease_id: str) -> None:
        self._timed("a release", lambda: self._do(cmd.Release(lease_id, is_holder=True)))

    def fill(self) -> None:
        while len(self._state.queue) < self._effort.waiters:
            self._request()
        self._settle()

    def second(self, number: int) -> None:
        """One second of the fleet."""
        self._now += 1.0
        if number == self._effort.seconds // 2:
            self._lead()
        self._timed("a tick of the pool", lambda: self._do(cmd.Tick()))
        at = self._now
        while at < self._now + HEARTBEATS_S:
            self._timed("a heartbeat to a part of the boxes", partial(self._tell_time, at))
            at = self._leader.next_due_at()
        self._settle()
        if number % BREAK_EVERY_S == 0:
            box = self._rng.choice(list(self._by_session.values()))
            assert box.session is not None
            session = box.session
            del self._by_session[session]
            box.part()
            self._away.append((self._now + BREAK_S, box))
            self._timed("a box that is gone", lambda: self._carry_out(self._leader.closed(session, self._now)))
        while self._away and self._away[0][0] <= self._now:
            _, back = self._away.popleft()
            if back.session is None:
                self._join(back)
        for box in self._by_session.values():
            box.tick(self._now)
            box.look(self._now)
        self._settle()
        while self._ends and self._ends[0][0] <= self._now:
            self._release(heapq.heappop(self._ends)[1])
            self._request()
        self._settle()

    @property
    def held(self) -> int:
        return sum(box.held for box in self.boxes)


def report(results: Results, effort: Effort) -> None:
    """Measure it, and add it to the results."""
    collect_garbage_seldom()
    began = time.monotonic()
    fleet = VirtualFleet(effort)
    fleet.fill()
    start_s, fleet.cpu_s = fleet.cpu_s, 0.0
    grants, messages = fleet.grants, fleet.messages
    for number in range(1, effort.seconds + 1):
        fleet.second(number)
    results.table(
        f"{effort.seconds:,} s of virtual time with {effort.gpus:,} GPUs and {effort.waiters:,} requests that wait",
        ["", "the core of the leader"],
        [
            ["% of a core, in the mean", 100 * fleet.cpu_s / effort.seconds],
            ["grants", fleet.grants - grants],
            ["messages of the boxes", fleet.messages - messages],
            ["GPUs that were held at the end, %", 100 * fleet.held / effort.gpus],
            ["until all boxes were there and all requests waited, processor time", duration(start_s)],
            ["all of it took", duration(time.monotonic() - began)],
        ],
    )
    results.table(
        "The longest of each kind, processor time",
        ["", "longest"],
        [[what, duration(took_s)] for what, took_s in sorted(fleet.longest_s.items())],
    )
