"""A process of a contender, which takes and releases GPUs as it is told, alone or as a crowd.

    python -m benchmarks.contenders.worker '{"kind": "filelock", "settings": {...}}'

It reads orders from standard input, answers each with a line, and ends when its input ends. A crowd is forked, so that
each client is a process. Ray's and Dask's clients are threads of one driver, because the processes that hold GPUs are theirs.
Times come from CLOCK_MONOTONIC, which all processes of one machine share.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import mmap
import os
import pkgutil
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
MORE_TAKERS = {
    "ray": "benchmarks.contenders.ray_takers",
    "dask": "benchmarks.contenders.dask_takers",
    **dict.fromkeys(("command", "hyperqueue", "slurm"), "benchmarks.contenders.job_takers"),
}
# How long clients that still wait at the end may go on.
GRACE_S = 3.0
# A client is warm when a step brings less than this many times the cycles of the step before. The time of a round is
# divided into steps; a client that has run before has shorter steps, because it is warm sooner.
STILL_GROWING = 1.15
FIRST_STEPS, LATER_STEPS, MOST_STEPS = 4, 10, 24


class Worker:
    """Carries out one order after the other."""

    def __init__(self, kind: str, settings: Settings) -> None:
        self.has_threads = kind.startswith(("ray", "dask"))
        self._kind = kind
        self._settings = settings
        self._taker: Taker | None = None
        self._handle: Handle | None = None
        self._racers: Racers | None = None

    def make(self) -> Taker:
        """Make a client."""
        # Loaded only where they are used, because the start of a client is measured.
        module = MORE_TAKERS.get(self._kind.partition("-")[0])
        takers = TAKERS if module is None else importlib.import_module(module).TAKERS
        taker: Taker = takers[self._kind](self._settings)
        return taker

    def load(self) -> None:
        """Import the modules that each client needs, once for all that are forked."""
        for name in MODULES.get(self._kind, ()):
            module = importlib.import_module(name)
            if name.startswith("gpu_worker_pool"):
                for below in pkgutil.walk_packages(module.__path__, f"{name}."):
                    importlib.import_module(below.name)

    @property
    def taker(self) -> Taker:
        """The client of this process. It is made when first needed, never before a crowd is forked."""
        self._taker = self._taker or self.make()
        return self._taker

    def take(self) -> dict[str, object]:
        """Take a GPU and hold it from now on."""
        self._handle = self.taker.take()
        return {"at": self._handle.at, "pid": self._handle.pid, "gpu": self._handle.gpu}

    def release(self) -> dict[str, object]:
        """Release the GPU, and return when that began."""
        assert self._handle is not None
        began = time.monotonic()
        self.taker.release(self._handle)
        self._handle = None
        return {"began": began}

    def cycles(self, seconds: float) -> dict[str, object]:
        """Time cycles for this many seconds, at least one."""
        cycle = cycle_of(self.taker)
        times_s: list[float] = []
        until = time.monotonic() + seconds
        while not times_s or time.monotonic() < until:
            began = time.perf_counter()
            cycle()
            times_s.append(time.perf_counter() - began)
        return {"times_s": times_s}

    def rate(self, clients: int, seconds: float, warm_up_s: float) -> dict[str, object]:
        """Measure the cycles a second of many clients at once, each as fast as it can, once that no longer grows.

        The first call makes the clients, and lets them run for at least `warm_up_s` before anything is counted. Between
        calls they wait. One process serves only one number of clients.
        """
        if self._racers is None:
            self._racers = Racers(self, clients)
            return {"rate": self._racers.rate(seconds, warm_up_s, FIRST_STEPS)}
        return {"rate": self._racers.rate(seconds, 0.0, LATER_STEPS)}

    def crowd(
        self, clients: int, seconds: float, folder: str, hold_s: tuple[float, float], *, has_victim: bool
    ) -> dict[str, object]:
        """Let clients ask, hold and release until the time is over. Halfway, the first client keeps its GPU and is killed."""

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
                        # Another process is killed, so this one must not keep the witness locked.
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
    """Many clients that begin at once and report through one pipe. It kills the process that a client names as `victim`."""

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
        """Return what the clients report until all have ended, or until a little after the time is over."""
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
        """Start the clients; each waits at the gate when it is ready."""
        (self._start_threads if self._worker.has_threads else self._start_processes)(client)

    def wait_until_ready(self) -> None:
        """Wait until all clients are at the gate. Raises the error of a client that failed."""
        for _ in range(self._clients):
            assert select.select([self._ready[0]], [], [], 60.0)[0], "a client is not ready"
            os.read(self._ready[0], 1)
        self._listen(time.monotonic())

    def let_go(self) -> None:
        """Open the gate once for all clients."""
        os.write(self._gate[1], bytes(self._clients))

    def _listen(self, until: float) -> list[dict[str, Any]]:
        """Return what the clients report until then, or until no client is left."""
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
            # Until its parent has waited for it, it seems to live.
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
            # Both `wait_until_ready` and `_listen` must learn of it.
            os.write(self._ready[1], b"r")
            self._say({"gone": number, "error": repr(error)[:500]})
            raise
        self._say({"gone": number})

    def _begin(self) -> float:
        os.write(self._ready[1], b"r")
        os.read(self._gate[0], 1)
        return time.monotonic()

    def _say(self, row: dict[str, Any]) -> None:
        # Shorter than PIPE_BUF, so that lines of several clients do not mix.
        os.write(self._lines[1], json.dumps(row).encode() + b"\n")


class Racers:
    """A crowd that cycles while a flag is set, and otherwise waits at the gate."""

    def __init__(self, worker: Worker, clients: int) -> None:
        # Shared by all processes. Each changes only its own number, and only this one changes the flag.
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
        """Return the cycles a second of all clients. Before and after, the flag is clear and all are at the gate."""
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
        """Wait until a step brings hardly more cycles than the one before it, or for `MOST_STEPS` steps."""
        last = 0
        for _ in range(MOST_STEPS):
            before = sum(self._counts)
            time.sleep(step_s)
            now = sum(self._counts) - before
            if last and now <= STILL_GROWING * last:
                return
            last = now


def cycle_of(taker: Taker) -> Callable[[], None]:
    """Return the cycle of a client: its own, or else take and release."""
    own: Callable[[], None] | None = getattr(taker, "cycle", None)
    return own or (lambda: taker.release(taker.take()))


def is_locked(witness: int) -> bool:
    """Lock the witness file, and return whether no other client had locked it."""
    try:
        fcntl.flock(witness, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def main() -> None:
    # Ray writes to standard output. So only the answers go there, and everything else goes to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    given = json.loads(sys.argv[1])
    worker = Worker(given["kind"], given["settings"])
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(worker, order.pop("do"))(**order)
        print(json.dumps(answer), file=answers, flush=True)
    # Without any cleanup: a client that still holds a GPU must end like any other.
    os._exit(0)


if __name__ == "__main__":
    main()
