"""`gpu-pool demo`: a pool at work on this machine, with real failures and measured results."""

from __future__ import annotations

import secrets
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from gpu_worker_pool.cli.declare import Option
from gpu_worker_pool.cli.options import Json
from gpu_worker_pool.cli.output import complain, print_json
from gpu_worker_pool.failure import SIGNAL_BASE

BROKEN = 1


def demo(
    workers: Annotated[int, Option(metavar="NUMBER", min=2, max=64, help="How many worker processes compete.")] = 12,
    gpus: Annotated[int, Option(metavar="NUMBER", min=1, max=32, help="Number of simulated GPUs.")] = 4,
    seconds: Annotated[float, Option(metavar="NUMBER", min=3, max=600, help="How long they compete.")] = 14.0,
    seed: Annotated[
        int | None,
        Option(metavar="NUMBER", min=0, help="Seed of the times for which GPUs are held; random by default."),
    ] = None,
    json: Json = False,
    cheat: Annotated[bool, Option("--cheat", hidden=True, help="One worker goes on after its release.")] = False,
) -> int:
    """See the pool at work: workers compete for GPUs, one of them is killed, and so is the server.

    It has a server, a port and a journal of its own, so that no other pool is disturbed, and needs no GPU. It ends by
    itself. All results are measured; the exit code is 1 if a promise was broken.
    """
    from .course import Demo  # noqa: PLC0415 - loads the client

    def stop(number: int, _: Any) -> None:
        sys.exit(SIGNAL_BASE + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # by nohup, for example
            signal.signal(number, stop)
    say = complain if json else _say
    with tempfile.TemporaryDirectory(prefix="gpu-pool-demo-", ignore_cleanup_errors=True) as folder:
        chosen = secrets.randbelow(1_000_000) if seed is None else seed
        course = Demo(Path(folder), gpus, say).run(workers, seconds, chosen, has_cheat=cheat)
    return show_results(course, json=json, about={"workers": workers, "gpus": gpus, "seed": chosen})


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the result


def show_results(course: Any, *, json: bool, about: dict[str, Any], by_journal: Sequence[str] | None = None) -> int:
    """Print the table of promises; the exit code says whether all were kept."""
    from .results import figures, promises  # noqa: PLC0415 - only once the demo has run

    found, measured = promises(course, by_journal), figures(course)
    is_ok = all(is_kept is not False for is_kept, _, _ in found) and measured["grants"] > 0
    if json:
        listed = [{"kept": is_kept, "promise": name, "text": text} for is_kept, name, text in found]
        print_json("demo", {"is_ok": is_ok, **about, **measured, "promises": listed})
        return 0 if is_ok else BROKEN
    marks = {True: "ok", False: "BROKEN", None: "-"}
    wait, handover = measured["wait_s"], measured["handover_ms"]
    rows = [
        *((marks[is_kept], name, text) for is_kept, name, text in found),
        ("", "Waits", f"median {wait['median']:.2f} s, longest {wait['longest']:.2f} s"),
        ("", f"Hand-overs: {handover['count']}", f"p50 {handover['p50']:.1f} ms, p99 {handover['p99']:.1f} ms"),
    ]
    width = max(len(name) for _, name, _ in rows)
    verdict = "Every promise was kept. Now yours: gpu-pool serve, then gpu-pool run -- CMD"
    lines = [f"{mark:<7} {name:<{width}}  {text}" for mark, name, text in rows]
    _say("\n".join(["", *lines, "", verdict if is_ok else "A promise was broken."]))
    return 0 if is_ok else BROKEN
