"""A process of a contender: takes and gives back as it is told, alone or as a crowd.

    python contenders_worker.py '{"kind": "filelock", "settings": {...}}'

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

from contenders_takers import MODULES, TAKERS, Handle, Settings, Taker

APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
# How long those who still wait at the end may go on.
GRACE_S = 3.0


class Worker:
    """Obeys one order after the other."""

    def __init__(self, kind: str, settings: Settings) -> None:
        self.has_threads = kind.startswith("ray")
        self._kind = kind
        self._settings = settings
        self._taker: Taker | None = None
        self._handle: Handle | None = None

    def make(self) -> Taker:
        """A client of its own."""
        if self.has_threads:
            from contenders_ray import TAKERS as RAY_TAKERS  # noqa: PLC0415 - only Ray's drivers need it

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

    def cycles(self, number: int) -> dict[str, object]:
        """So many cycles, each timed."""
        cycle = cycle_of(self.taker)
        times_s = []
        for _ in range(number):
            began = time.perf_counter()
            cycle()
            times_s.append(time.perf_counter() - began)
        return {"times_s": times_s}

    def rate(self, clients: int, seconds: float, *, has_warm_up: bool) -> dict[str, object]:
        """Cycles a second of so many clients at once, each as fast as it can."""
        crowd = Crowd(self, clients)

        def run(number: int, begin: Begin, _: Say) -> None:
            cycle = cycle_of(self.make())
            if has_warm_up:
                cycle()
            until = begin() + seconds
            while time.monotonic() < until:
                cycle()
                crowd.counts[number] += 1

        crowd.run(run, seconds)
        return {"rate": crowd.counted / seconds}

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
                time.sleep(choose.uniform(*hold_s))
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
        # Seen by all processes; each changes its own. `counted` is the sum of them when the time was over.
        self.counts = memoryview(mmap.mmap(-1, 8 * clients)).cast("Q")
        self.counted = 0

    def run(self, client: Client, seconds: float) -> list[dict[str, Any]]:
        """What they said, until all have ended or the time is over and a little more."""
        start = self._start_threads if self._worker.has_threads else self._start_processes
        start(client)
        try:
            for _ in range(self._clients):
                assert select.select([self._ready[0]], [], [], 60.0)[0], "a client is not ready"
                os.read(self._ready[0], 1)
            os.write(self._gate[1], bytes(self._clients))
            until = time.monotonic() + seconds
            rows = self._listen(until)
            self.counted = sum(self.counts)
            return rows + self._listen(until + GRACE_S)
        finally:
            for pid in self._pids:
                os.kill(pid, signal.SIGKILL)
            for pid in self._pids:
                os.waitpid(pid, 0)

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
