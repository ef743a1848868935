"""This server compared with what people would use instead: Ray, locks in Redis, files and PostgreSQL, schedulers, statistics.

Every contender hands out the same number of simulated GPUs on this machine, and is asked in the same two calls: take a
GPU, and release it. Contenders take turns. A contender that is not installed is skipped, with the reason:

    python -m benchmarks.peers --debian      # puts the Python packages into .bench-venv, and installs the programs as root

It stops by itself. `--only NAME`, which may be repeated, leaves out all others.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import peers
from benchmarks.contenders.comparison import QUICK, WHOLE, Comparison
from benchmarks.contenders.field import FIELD, Contender
from benchmarks.shared.results import Results, parser

TOO_LONG_FOR_QUICK = ("Ray", "Redis lock, timeout", "Dask", "Slurm")


def chosen(only: Sequence[str], results: Results, *, is_quick: bool) -> list[Contender]:
    """Return the contenders that are named, or all except those that would take too long."""
    unknown = set(only) - {each.name for each in FIELD}
    if unknown:
        raise SystemExit(f"--only: {', '.join(sorted(unknown))}; there are {', '.join(each.name for each in FIELD)}")
    if only:
        return [each for each in FIELD if each.name in only]
    late = [each for each in FIELD if is_quick and each.name.startswith(TOO_LONG_FOR_QUICK)]
    if late:
        results.skip(", ".join(each.name for each in late), "it takes longer than the rest of a quick run")
    return [each for each in FIELD if each not in late]


def versions() -> str:
    """Return the versions of the peers that are installed."""
    found = []
    packages = {
        "redis": "redis",
        "hiredis": "hiredis",
        "filelock": "filelock",
        "psycopg": "psycopg",
        "ray": "ray",
        "distributed": "distributed",
        "hyperqueue": "hyperqueue",
    }
    for package, module in {**packages, "simple-gpu-scheduler": "simple_gpu_scheduler"}.items():
        try:
            found.append(peers.version_of(package, peers.python_with(module)))
        except peers.MissingError:
            continue
    for name in ("redis-server", "postgres", "slurmctld"):
        try:
            found.append(peers.version_of_program(peers.program(name)))
        except peers.MissingError:
            continue
    return ", ".join(found)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", action="append", default=[], metavar="NAME", help="measure these and no others")
    arguments = options.parse_args()
    results = Results(
        "contenders", "Taking one of several GPUs and releasing it, compared with what people would use instead."
    )
    contenders = chosen(arguments.only, results, is_quick=arguments.quick)
    results.note(
        f"Peers: {versions() or 'none'}. All run at once on one machine with {os.cpu_count()} processors, also while another is measured, except for Dask."
    )
    # SIGTERM ends this program with an exception, so that it ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    effort = QUICK if arguments.quick else WHOLE
    with tempfile.TemporaryDirectory(prefix="contenders-") as folder:
        Comparison(contenders, effort, results, Path(folder)).run()
    results.finish(arguments)


if __name__ == "__main__":
    main()
