"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from .units import parse_duration_s, parse_memory_mb

Endpoints = Annotated[
    list[str] | None,
    typer.Option(
        "--endpoint",
        "-e",
        metavar="URL",
        help="The URL of a GPU server; for several, repeat it or use commas. By default the first that is set of "
        "GPU_STATS_SERVICE_ENDPOINTS, GPU_SERVICE_ENDPOINTS and GPU_SERVICE_ENDPOINT, else http://localhost:8000.",
    ),
]
FleetScope = Annotated[
    bool,
    typer.Option("--fleet", help="The whole fleet that the server belongs to, and not only the box that is asked."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, as docs/CLI.md describes it.")]
Gpus = Annotated[
    int,
    typer.Option(
        "--gpus", "-g", metavar="NUMBER", min=1, max=1024, help="How many GPUs, all in one machine, all or nothing."
    ),
]
MemoryPerGpu = Annotated[
    float | None,
    typer.Option(
        parser=parse_memory_mb,
        metavar="12GB",
        help="Share a GPU with others, and use this much of its memory. Without it, the GPU is yours alone.",
    ),
]
Model = Annotated[str | None, typer.Option(metavar="A100", help="A word of the GPU's name, or a pattern: `*80GB*`.")]
Priority = Annotated[int, typer.Option("--priority", "-p", metavar="NUMBER", help="Higher is served first.")]
Timeout = Annotated[
    float | None,
    typer.Option(parser=parse_duration_s, metavar="1h", help="How long to wait for GPUs; by default without limit."),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time",
        parser=parse_duration_s,
        metavar="2h",
        help="End the lease after so long: SIGTERM a minute before, SIGKILL at the limit. It may start sooner with this.",
    ),
]
Preemptible = Annotated[
    bool,
    typer.Option(
        "--preemptible", help="Use idle GPUs beyond quotas; end, after a warning, when another request needs them."
    ),
]
Grace = Annotated[
    float,
    typer.Option(
        parser=parse_duration_s,
        metavar="10s",
        help="The time between SIGTERM and SIGKILL; less if the GPU would be granted to another holder before.",
    ),
]
Remote = Annotated[
    bool,
    typer.Option(
        "--remote", help="Request GPUs of other machines too, for a command that goes there itself (by ssh, say)."
    ),
]
New = Annotated[
    bool,
    typer.Option(
        "--new", help="Inside a gpu-pool run or batch: request other GPUs, and not those of the lease around it."
    ),
]


Name = Annotated[
    str | None,
    typer.Option(
        "--name", "-n", metavar="TEXT", help="The name that others see in `status`; otherwise the script or module."
    ),
]
Command = Annotated[list[str], typer.Argument(metavar="-- CMD [ARG]...", help="The command with its arguments.")]
Nodes = Annotated[
    int,
    typer.Option(
        "--nodes", metavar="NUMBER", min=1, max=1024, help="GPUs on each of so many boxes of the fleet, all or nothing."
    ),
]
Ssh = Annotated[
    bool, typer.Option("--ssh", help="With --nodes: start the command on the other boxes too, by your own ssh.")
]
EnvNames = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="NAME", help="With --ssh: pass this variable on; may be given again."),
]
OnGranted = Annotated[
    str | None,
    typer.Option(
        "--on-granted",
        metavar="PROGRAM",
        help="Run this when the GPUs are there, beside the command. No shell reads it; for one: \"sh -c '...'\".",
    ),
]
Notify = Annotated[
    list[str] | None,
    typer.Option(
        "--notify",
        metavar="URL",
        help="Tell this when it is granted, warned, lost and ended: ntfy://TOPIC, slack://..., mailto://... or any other URL of "
        "Apprise, or the name of a variable that has one; may be given again.",
    ),
]
Retries = Annotated[
    int,
    typer.Option("--retries", "-r", metavar="NUMBER", min=0, max=1000, help="How often to run a failed job again."),
]
