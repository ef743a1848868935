"""`gpu-pool demo`: a pool at work on this machine, with real failures and measured results."""

from __future__ import annotations

import asyncio
import faulthandler
import secrets
import signal
from typing import Annotated, Final

import typer
from rich.console import Console

from gpu_worker_pool.cli.failure import SIGNAL_BASE
from gpu_worker_pool.cli.options import Json
from gpu_worker_pool.cli.output import out, print_json

BROKEN: Final = 1
# The limit of a demo; a long one has so much time beside its seconds, to start everything and to serve the last
# waiters.
_LONGEST_S: Final = 28.0
_BESIDE_S: Final = 14.0
# A fleet has more to start, and to end.
_BESIDE_FLEET_S: Final = 60.0
_SECONDS: Final = 14.0
_FLEET_S: Final = 40.0


def demo(
    workers: Annotated[
        int, typer.Option(metavar="NUMBER", min=2, max=64, help="How many worker processes compete.")
    ] = 12,
    gpus: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            min=1,
            max=32,
            help="Number of simulated GPUs. By default this machine's GPUs, or four simulated ones.",
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", min=3, max=600, help="How long they compete: 14 by default, 40 in a fleet."),
    ] = None,
    fleet: Annotated[
        bool,
        typer.Option(
            "--fleet",
            help="Three boxes of a fleet on a real PostgreSQL, with --gpus simulated GPUs each (2). The leader and the "
            "database are killed instead of the server.",
        ),
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", min=0, help="Seed of the times for which GPUs are held; random by default."),
    ] = None,
    json: Json = False,
    cheat: Annotated[bool, typer.Option("--cheat", hidden=True, help="One worker goes on after its release.")] = False,
    limit: Annotated[float | None, typer.Option(min=1, hidden=True, help="Give up after so many seconds.")] = None,
) -> int:
    """See the pool at work: workers compete for GPUs, one of them is killed, and so is the server.

    It has a server, a port and a journal of its own, so that no other pool is disturbed, and needs no GPU. It ends by
    itself. All results are measured; the exit code is 1 if a promise was broken.
    """
    from .demo import Demo, DemoPlan  # noqa: PLC0415 - loads the client
    from .fleet import FleetDemo  # noqa: PLC0415
    from .folder import demo_folder  # noqa: PLC0415
    from .summary import Record, render, summarize  # noqa: PLC0415

    lasts_s = seconds or (_FLEET_S if fleet else _SECONDS)
    plan = DemoPlan(
        workers,
        gpus,
        lasts_s,
        seed=secrets.randbelow(1_000_000) if seed is None else seed,
        longest_s=limit or (lasts_s + _BESIDE_FLEET_S if fleet else max(_LONGEST_S, lasts_s + _BESIDE_S)),
        has_cheat=cheat,
    )
    console = Console(stderr=True, highlight=False) if json else out()

    async def run_demo() -> Record | int:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        received: list[signal.Signals] = []

        def stop(number: signal.Signals) -> None:
            received.append(number)
            if task is not None:
                task.cancel()

        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # by nohup, for example
                loop.add_signal_handler(number, stop, number)
        try:
            with demo_folder() as folder:
                return await (FleetDemo if fleet else Demo)(plan, console, folder).run()
        except asyncio.CancelledError:
            if not received:
                raise  # by Ctrl-C
            return SIGNAL_BASE + received[0]

    # If even the event loop hangs: the kernel ends the other processes with this one.
    faulthandler.dump_traceback_later(plan.longest_s + 1.5, exit=True)
    try:
        record = asyncio.run(run_demo())
    finally:
        faulthandler.cancel_dump_traceback_later()
    if isinstance(record, int):
        return record
    summary = summarize(record)
    if console.is_terminal or not json:
        console.print(render(summary))
    if json:
        print_json("demo", summary)
    return 0 if summary["is_ok"] else BROKEN
