"""How long until the next waiter holds the GPU: after a release in another process, and after that process was killed.

Times come from CLOCK_MONOTONIC, which all processes of one machine share.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection

from benchmarks.leases.locks import TIMEOUT_S, Lock

MakeLock = Callable[[], Lock]
# Forked: a holder starts quickly, and makes its own lock, with a connection and a pid of its own.
FORK = multiprocessing.get_context("fork")
# Time enough for the next client to have begun to wait.
SETTLE_S = 0.015


def hand_overs(make: MakeLock, number: int, poll_s: float) -> list[float]:
    """Return the seconds from before each release until the waiter in the other process holds the lock.

    The release comes at a random moment within `poll_s`, so that it does not always meet a polling waiter at the same
    point. The first hand-over is not counted: it makes the connections.
    """
    found = []
    # Forked before this process has a client of its own, which may have threads.
    with child(_wait_each_time, make) as waiter, closing(make()) as mine:
        for _ in range(1 + number):
            mine.acquire()
            waiter.send(None)
            time.sleep(SETTLE_S + random.uniform(0, poll_s))
            began = time.monotonic()
            mine.release()
            found.append(_receive(waiter) - began)
            _receive(waiter)  # the waiter has released it
    return found[1:]


def kills(make: MakeLock, number: int, poll_s: float) -> list[float]:
    """Return the seconds from before each `kill -9` of the holder until the waiter in another process holds the lock."""
    found = []
    with child(_wait_each_time, make) as waiter:
        for _ in range(number):
            with child(_hold_until_killed, make) as holder:
                pid = int(_receive(holder))
                waiter.send(None)
                time.sleep(SETTLE_S + random.uniform(0, poll_s))
                began = time.monotonic()
                os.kill(pid, signal.SIGKILL)
                found.append(_receive(waiter) - began)
            _receive(waiter)
    return found


@contextmanager
def child(role: Callable[[Connection, MakeLock], None], make: MakeLock) -> Iterator[Connection]:
    """Run a role in another process, and yield a pipe to it."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=role, args=(theirs, make), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()
        ours.close()


def _wait_each_time(pipe: Connection, make: MakeLock) -> None:
    lock = make()
    while True:
        pipe.recv()
        lock.acquire()
        held_at = time.monotonic()
        pipe.send(held_at)
        lock.release()
        pipe.send(0.0)


def _hold_until_killed(pipe: Connection, make: MakeLock) -> None:
    lock = make()
    lock.acquire()
    pipe.send(os.getpid())
    time.sleep(TIMEOUT_S)


def _receive(pipe: Connection) -> float:
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError("the other process does not answer")
    return float(pipe.recv())
