"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

from gpu_worker_pool.cli.declare import MORE, Argument, Option

from .units import parse_duration_s, parse_memory_mb

Endpoints = Annotated[
    list[str] | None,
    Option(
        "--endpoint",
        "-e",
        metavar="URL",
        group=MORE,
        help="The GPU server: gpu-2:8000 or a URL; several with commas. By default the one you are logged in at or "
        "that your environment names, else http://localhost:8000.",
    ),
]
FleetScope = Annotated[
    bool,
    Option("--fleet", group=MORE, help="The whole fleet that the server belongs to, not only its own box."),
]
Mine = Annotated[bool, Option("--mine", help="Only what is yours.")]
Json = Annotated[bool, Option("--json", group=MORE, help="Print JSON; docs/CLI.md describes it.")]
Gpus = Annotated[
    int,
    Option(
        "--gpus", "-g", metavar="NUMBER", min=1, max=1024, help="How many GPUs, all in one machine, all or nothing."
    ),
]
MemoryPerGpu = Annotated[
    float | None,
    Option(
        parser=parse_memory_mb,
        metavar="12GB",
        help="Share a GPU with others, and use this much of its memory. Without it, the GPU is yours alone.",
    ),
]
Model = Annotated[str | None, Option(metavar="A100", help="A word of the GPU's name, or a pattern: `*80GB*`.")]
Priority = Annotated[int, Option("--priority", "-p", metavar="NUMBER", help="Higher is served first.")]
Timeout = Annotated[
    float | None,
    Option(parser=parse_duration_s, metavar="1h", help="How long to wait for GPUs; by default without limit."),
]
TimeLimit = Annotated[
    float | None,
    Option(
        "--time",
        parser=parse_duration_s,
        metavar="2h",
        help="End the lease after this time: SIGTERM a minute before, SIGKILL at the limit. Short requests may start sooner.",
    ),
]
Preemptible = Annotated[
    bool,
    Option("--preemptible", help="Use idle GPUs beyond quotas; end, after a warning, when another request needs them."),
]
Grace = Annotated[
    float,
    Option(
        parser=parse_duration_s,
        metavar="10s",
        group=MORE,
        help="The time between SIGTERM and SIGKILL; less if the lease ends sooner.",
    ),
]
Remote = Annotated[
    bool,
    Option(
        "--remote",
        group=MORE,
        help="Request GPUs of other machines too, for a command that goes there itself (by ssh, say).",
    ),
]
New = Annotated[
    bool,
    Option(
        "--new",
        group=MORE,
        help="Inside a gpu-pool run or batch: request other GPUs, and not those of the lease around it.",
    ),
]


Name = Annotated[
    str | None,
    Option(
        "--name", "-n", metavar="TEXT", help="The name that others see in `status`; otherwise the script or module."
    ),
]
Command = Annotated[list[str], Argument(metavar="-- CMD [ARG]...", help="The command with its arguments.")]
Nodes = Annotated[
    int,
    Option(
        "--nodes",
        metavar="NUMBER",
        min=1,
        max=1024,
        group=MORE,
        help="GPUs on each of this many boxes of the fleet, all or nothing.",
    ),
]
Ssh = Annotated[
    bool, Option("--ssh", group=MORE, help="With --nodes: start the command on the other boxes too, by your own ssh.")
]
EnvNames = Annotated[
    list[str] | None,
    Option("--env", metavar="NAME", group=MORE, help="With --ssh: pass this variable on; may be given again."),
]
OnGranted = Annotated[
    str | None,
    Option(
        "--on-granted",
        metavar="PROGRAM",
        group=MORE,
        help="Run this when the GPUs are there, beside the command. No shell reads it; for one: \"sh -c '...'\".",
    ),
]
Notify = Annotated[
    list[str] | None,
    Option(
        "--notify",
        metavar="URL",
        group=MORE,
        help="Tell this when it is granted, warned, lost and ended: ntfy://TOPIC, slack://..., mailto://... or any other URL of "
        "Apprise, or the name of a variable that has one; may be given again.",
    ),
]
Retries = Annotated[
    int,
    Option("--retries", "-r", metavar="NUMBER", min=0, max=1000, help="How often to run a failed job again."),
]
