"""Random histories against the plain model, for as long as you like: `make soak-core`, or `python -m tests.core.soak`.

Each batch has a seed of its own, which is printed if it fails. The soak stops at the first failure, prints the shortest history
that fails as a program (see test_pool_properties.py), and exits with 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import islice

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.core.pool_machine import PoolMachine
from tests.core.queue_machine import QueueMachine

MACHINES: dict[str, tuple[type[PoolMachine], int]] = {"pool": (PoolMachine, 40), "queue": (QueueMachine, 30)}
BATCH = 250
PROGRESS_S = 60.0
# A machine, the number of its histories, and the seed of these.
Batch = tuple[str, int, int]


def batches(histories: int, first_seed: int) -> Iterator[Batch]:
    """Batches of both machines in turn, which add up to this number of histories."""
    numbers = random.Random(first_seed)
    names = sorted(MACHINES)
    for number, begins in enumerate(range(0, histories, BATCH)):
        yield names[number % len(names)], min(BATCH, histories - begins), numbers.randrange(2**32)


def play(batch: Batch) -> str | None:
    """Play a batch. Return what failed; None if nothing did."""
    name, number, number_seed = batch
    machine, steps = MACHINES[name]
    terms = settings(
        max_examples=number,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=False,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink],
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(seed(number_seed)(type(machine.__name__, (machine,), {})), settings=terms)
    except Exception:  # noqa: BLE001 - whatever fails is told
        return f"{traceback.format_exc()}\n{machine.__name__}, seed {number_seed}: a history has failed\n"
    return None


def soak(histories: int, first_seed: int, workers: int) -> int:
    """Play this number of histories; return the exit code."""
    began = told = time.monotonic()
    played, left = 0, batches(histories, first_seed)
    with ProcessPoolExecutor(workers) as pool:
        running = {pool.submit(play, batch): batch for batch in islice(left, workers)}
        while running:
            done = next(as_completed(running))
            _, number, _ = running.pop(done)
            if (failure := done.result()) is not None:
                pool.shutdown(wait=False, cancel_futures=True)
                tell(failure)
                return 1
            played += number
            running |= {pool.submit(play, batch): batch for batch in islice(left, 1)}
            if time.monotonic() - told >= PROGRESS_S or not running:
                told = time.monotonic()
                tell(f"{played} of {histories} histories in {told - began:.0f} s, none failed")
    return 0


def tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description="Play random histories of the core against the plain model.")
    parser.add_argument("--histories", type=int, default=100_000)
    parser.add_argument(
        "--seed", type=int, default=None, help="of the whole soak; drawn and printed if it is not given"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that play batches")
    given = parser.parse_args()
    first_seed = random.SystemRandom().randrange(2**32) if given.seed is None else given.seed
    tell(f"{given.histories} histories, seed {first_seed}")
    return soak(given.histories, first_seed, given.workers)


if __name__ == "__main__":
    sys.exit(main())
