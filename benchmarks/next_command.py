"""How soon the next command starts: several commands wait for one GPU, each in a `gpu-pool run`, beside HyperQueue, `srun` and `ts`.

A command is a shell that notes the time of its first and of its last instruction. The first command runs until all others wait. A value is
the time from the last instruction of one command to the first of the next. Then each runs `true` alone, from the prompt and back to it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from benchmarks.contenders.contender import Queue, serving
from benchmarks.figures import Results, compare, in_turn, parser
from benchmarks.peers import MissingError

COMMANDS, QUICK_COMMANDS = 5, 2
ROUNDS, QUICK_ROUNDS = 3, 1
OURS = "ours"
# Each by the ending of its figure: how it is shown, and its module.
FIELD = {
    OURS: ("gpu-pool run", "pool"),
    "hyperqueue": ("HyperQueue", "hyperqueue"),
    "srun": ("srun", "slurm"),
    "ts": ("ts", "task_spooler"),
}
# The first word is the file to write to. A second one is a named pipe: the command waits until it can be opened for reading.
PROBE = 'began=$EPOCHREALTIME; [ -z "$2" ] || read -r _ < "$2"; echo "$began $EPOCHREALTIME" >> "$1"'
BASH = ("/bin/bash", "--norc", "--noprofile", "-c", PROBE, "probe")


def gaps_s(times: Sequence[tuple[float, float]]) -> list[float]:
    """Return the time from the end of each command to the beginning of the next. RuntimeError if two have run at once."""
    ordered = sorted(times)
    found = [after[0] - before[1] for before, after in pairwise(ordered)]
    if any(gap < 0 for gap in found):
        raise RuntimeError(f"two commands have run at once: {found}")
    return found


def next_command_s(queue: Queue, folder: Path, number: int) -> float:
    """Let a number of commands wait behind a first one; return the median of the times between them."""
    folder.mkdir(exist_ok=True)
    noted, go = folder / "times", folder / "go"
    noted.unlink(missing_ok=True)
    go.unlink(missing_ok=True)
    os.mkfifo(go)
    wait = queue.line_up([[*BASH, str(noted), str(go)], *([[*BASH, str(noted)]] * number)])
    go.write_text("go\n", encoding="ascii")
    wait()
    times = [(float(began), float(ended)) for began, ended in map(str.split, noted.read_text().splitlines())]
    assert len(times) == number + 1, f"{len(times)} commands have run"
    return statistics.median(gaps_s(times))


def alone_s(queue: Queue) -> float:
    """Return how long `true` takes, from when it is typed until the prompt is back, while nothing else runs."""
    began = time.monotonic()
    queue.run_one(["true"])
    return time.monotonic() - began


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--only", action="append", choices=[name for name in FIELD if name != OURS])
    options = options_of.parse_args()
    number, rounds = (QUICK_COMMANDS, QUICK_ROUNDS) if options.quick else (COMMANDS, ROUNDS)
    results = Results("next_command")
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        queues: dict[str, Queue] = {}
        for name, (shown, module) in FIELD.items():
            if name in (OURS, *(options.only or FIELD)):
                try:
                    queue = held.enter_context(serving(module, folder / module, 1)).queue
                except (MissingError, OSError, RuntimeError) as error:
                    results.leave_out(shown, str(error))
                else:
                    assert queue is not None
                    queues[name] = queue
        found = in_turn(
            {
                name: lambda name=name, queue=queue: next_command_s(queue, folder / f"{name}-probe", number)  # type: ignore[misc]
                for name, queue in queues.items()
            },
            rounds,
        )
        add(results, "next_run", found)
        # The first round only warms up, and is not counted.
        in_turn({name: lambda queue=queue: alone_s(queue) for name, queue in queues.items()}, 1)  # type: ignore[misc]
        found = in_turn({name: lambda queue=queue: alone_s(queue) for name, queue in queues.items()}, 3 * rounds)  # type: ignore[misc]
        add(results, "one_run", found)
    results.finish(options)


def add(results: Results, figure: str, found: dict[str, list[float]]) -> None:
    """Add ours beside each of the others."""
    for name, values in found.items():
        if name != OURS and OURS in found:
            results.add(f"{figure}_{name}", compare(found[OURS], values, "s", FIELD[name][0]))


if __name__ == "__main__":
    main()
