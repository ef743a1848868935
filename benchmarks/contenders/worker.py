"""A process of a contender: takes and gives back as it is told, alone or as a crowd.

    python -m benchmarks.contenders.worker '{"kind": "filelock", "settings": {...}}'

It reads orders from standard input and answers each with a line; it ends when the orders do. A crowd is forked, so that
each client is a process; Ray's clients are threads of one driver, because the processes that hold are Ray's own.
Times are CLOCK_MONOTONIC, which all processes of one machine share.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import mmap
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.contenders.takers import MODULES, TAKERS, Handle, Settings, Taker

APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
# How long those who still wait at the end may go on.
GRACE_S = 3.0
# It is warm when a step brings less than so many times what the one before it did. Steps are parts of what is measured;
# who has run before is warm sooner.
STILL_GROWING = 1.15
FIRST_STEPS, LATER_STEPS, MOST_STEPS = 4, 10, 24


class Worker:
    """Obeys one order after the other."""

    def __init__(self, kind: str, settings: Settings) -> None:
        self.has_threads = kind.startswith("ray")
        self._kind = kind
        self._settings = settings
        self._taker: Taker | None = None
        self._handle: Handle | None = None
        self._racers: Racers | None = None

    def make(self) -> Taker:
        """A client of its own."""
        if self.has_threads:
            from benchmarks.contenders.ray_takers import TAKERS as RAY_TAKERS  # noqa: PLC0415 - only Ray's drivers need it

            return RAY_TAKERS[self._kind](self._settings)
        return TAKERS[self._kind](self._settings)

    def load(self) -> None:
        """What its clients would each import, once for all that are forked."""
        for module in MODULES.get(self._kind, ()):
            importlib.import_module(module)

    @property
    def taker(self) -> Taker:
        """The client of this process. It is made when it is needed: never before a crowd is forked."""
        self._taker = self._taker or self.make()
        return self._taker

    def take(self) -> dict[str, object]:
        """Hold one from now on."""
        self._handle = self.taker.take()
        return {"at": self._handle.at, "pid": self._handle.pid, "gpu": self._handle.gpu}

    def release(self) -> dict[str, object]:
        """Give it back, and say when that began."""
        assert self._handle is not None
        began = time.monotonic()
        self.taker.release(self._handle)
        self._handle = None
        return {"began": began}

    def cycles(self, seconds: float) -> dict[str, object]:
        """For so long, and at least one; each timed."""
        cycle = cycle_of(self.taker)
        times_s: list[float] = []
        until = time.monotonic() + seconds
        while not times_s or time.monotonic() < until:
            began = time.perf_counter()
            cycle()
            times_s.append(time.perf_counter() - began)
        return {"times_s": times_s}

    def rate(self, clients: int, seconds: float, warm_up_s: float) -> dict[str, object]:
        """Cycles a second of so many clients at once, each as fast as it can, from when that is no longer growing.

        They are made the first time, and then run for so long at least before anything is counted; from then on they
        wait until they are told to go on. A process is for one number of them.
        """
        if self._racers is None:
            self._racers = Racers(self, clients)
            return {"rate": self._racers.rate(seconds, warm_up_s, FIRST_STEPS)}
        return {"rate": self._racers.rate(seconds, 0.0, LATER_STEPS)}

    def crowd(
        self, clients: int, seconds: float, folder: str, hold_s: tuple[float, float], *, has_victim: bool
    ) -> dict[str, object]:
        """Ask, hold and give back until the time is over. Halfway the first one keeps its GPU, and is killed for that."""

        def run(number: int, begin: Begin, say: Say) -> None:
            taker = self.make()
            choose = random.Random(number)
            began = begin()
            is_victim = has_victim and number == 0
            while time.monotonic() < began + seconds:
                asked = time.monotonic()
                handle = taker.take()
                witness = os.open(f"{folder}/{handle.gpu}.witness", APPEND, 0o600)
                row = {"asked": asked, "granted": handle.at, "gpu": handle.gpu, "twice": not is_locked(witness)}
                if is_victim and time.monotonic() > began + seconds / 2:
                    if handle.pid != os.getpid():
                        # Another process is going to die, and its testimony with it.
                        os.close(witness)
                    say({**row, "victim": handle.pid})
                    time.sleep(WITH_VICTIM_S)
                wake = time.monotonic() + choose.uniform(*hold_s)
                time.sleep(max(0.0, wake - time.monotonic()))
                row["late"] = time.monotonic() - wake
                os.close(witness)
                say(row)
                taker.release(handle)

        return {"rows": Crowd(self, clients).run(run, seconds)}


Begin = Callable[[], float]
Say = Callable[[dict[str, Any]], None]
Client = Callable[[int, Begin, Say], None]
WITH_VICTIM_S = 600.0


class Crowd:
    """Many clients that begin at once, and whose lines come through one pipe. It kills the one that says `victim`."""

    def __init__(self, worker: Worker, clients: int) -> None:
        self._worker = worker
        self._clients = clients
        self._left = clients
        self._pids: list[int] = []
        self._received = b""
        self._lines = os.pipe()
        self._ready = os.pipe()
        self._gate = os.pipe()

    def run(self, client: Client, seconds: float) -> list[dict[str, Any]]:
        """What they said, until all have ended or the time is over and a little more."""
        try:
            self.start(client)
            self.wait_until_ready()
            self.let_go()
            return self._listen(time.monotonic() + seconds + GRACE_S)
        finally:
            for pid in self._pids:
                os.kill(pid, signal.SIGKILL)
            for pid in self._pids:
                os.waitpid(pid, 0)

    def start(self, client: Client) -> None:
        """Make them; each waits at the gate when it is ready."""
        (self._start_threads if self._worker.has_threads else self._start_processes)(client)

    def wait_until_ready(self) -> None:
        """Until all are at the gate. What one of them died of is raised."""
        for _ in range(self._clients):
            assert select.select([self._ready[0]], [], [], 60.0)[0], "a client is not ready"
            os.read(self._ready[0], 1)
        self._listen(time.monotonic())

    def let_go(self) -> None:
        """Open the gate, for all of them once."""
        os.write(self._gate[1], bytes(self._clients))

    def _listen(self, until: float) -> list[dict[str, Any]]:
        """What is said until then, or until nobody is left."""
        rows: list[dict[str, Any]] = []
        while self._left and select.select([self._lines[0]], [], [], max(0.0, until - time.monotonic()))[0]:
            *lines, self._received = (self._received + os.read(self._lines[0], 65536)).split(b"\n")
            for row in map(json.loads, lines):
                if "victim" in row:
                    row["killed"] = time.monotonic()
                    self._kill(row["victim"])
                if "error" in row:
                    raise RuntimeError(row["error"])
                self._left -= "gone" in row or "victim" in row
                if "gone" not in row:
                    rows.append(row)
        return rows

    def _kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        if pid in self._pids:
            # Until its parent has looked, it seems to be there.
            self._pids.remove(pid)
            os.waitpid(pid, 0)

    def _start_processes(self, client: Client) -> None:
        self._worker.load()
        for number in range(self._clients):
            pid = os.fork()
            if not pid:
                status = 1
                try:
                    self._live(client, number)
                    status = 0
                finally:
                    os._exit(status)
            self._pids.append(pid)

    def _start_threads(self, client: Client) -> None:
        for number in range(self._clients):
            threading.Thread(target=self._live, args=(client, number), daemon=True).start()

    def _live(self, client: Client, number: int) -> None:
        try:
            client(number, self._begin, self._say)
        except BaseException as error:
            # Whoever waits until it is ready is told, and so is whoever reads what it says.
            os.write(self._ready[1], b"r")
            self._say({"gone": number, "error": repr(error)[:500]})
            raise
        self._say({"gone": number})

    def _begin(self) -> float:
        os.write(self._ready[1], b"r")
        os.read(self._gate[0], 1)
        return time.monotonic()

    def _say(self, row: dict[str, Any]) -> None:
        # Shorter than PIPE_BUF, so lines of several do not mix.
        os.write(self._lines[1], json.dumps(row).encode() + b"\n")


class Racers:
    """A crowd that cycles while a flag is up, and waits for the next time at the gate."""

    def __init__(self, worker: Worker, clients: int) -> None:
        # Seen by all processes; each changes its own number, and nobody but this one the flag.
        self._counts = memoryview(mmap.mmap(-1, 8 * clients)).cast("Q")
        self._flag = memoryview(mmap.mmap(-1, 8)).cast("Q")
        self._crowd = Crowd(worker, clients)

        def run(number: int, begin: Begin, _: Say) -> None:
            cycle = cycle_of(worker.make())
            while True:
                begin()
                while self._flag[0]:
                    cycle()
                    self._counts[number] += 1

        self._crowd.start(run)
        self._crowd.wait_until_ready()

    def rate(self, seconds: float, warm_up_s: float, steps: int) -> float:
        """Of all together. The flag is down, and all are at the gate, before and after."""
        self._flag[0] = 1
        self._crowd.let_go()
        time.sleep(warm_up_s)
        self._warm_up(seconds / steps)
        began, before = time.monotonic(), sum(self._counts)
        time.sleep(seconds)
        counted, took_s = sum(self._counts) - before, time.monotonic() - began
        self._flag[0] = 0
        self._crowd.wait_until_ready()
        return counted / took_s

    def _warm_up(self, step_s: float) -> None:
        """Until a step brings hardly more than the one before it, or there were too many."""
        last = 0
        for _ in range(MOST_STEPS):
            before = sum(self._counts)
            time.sleep(step_s)
            now = sum(self._counts) - before
            if last and now <= STILL_GROWING * last:
                return
            last = now


def cycle_of(taker: Taker) -> Callable[[], None]:
    """What a cycle is to this one: taking and giving back, if it has nothing better."""
    own: Callable[[], None] | None = getattr(taker, "cycle", None)
    return own or (lambda: taker.release(taker.take()))


def is_locked(witness: int) -> bool:
    """The witness's testimony: whether nobody else is on this GPU."""
    try:
        fcntl.flock(witness, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def main() -> None:
    # Ray writes to standard output when it likes to; the answers go where they are expected, and all else does not.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    given = json.loads(sys.argv[1])
    worker = Worker(given["kind"], given["settings"])
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(worker, order.pop("do"))(**order)
        print(json.dumps(answer), file=answers, flush=True)
    # Not at leisure: a client that still holds something is to be gone like any other.
    os._exit(0)


if __name__ == "__main__":
    main()
