"""Options that several commands share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gpu_worker_pool.cli.declare import COMMON, MORE, Argument, Option

from .units import parse_duration_s, parse_memory_mb

Endpoints = Annotated[
    list[str] | None,
    Option(
        "--endpoint",
        "-e",
        metavar="URL",
        group=COMMON,
        help="The GPU server: gpu-2:8000 or a URL; separate several with commas. By default GPU_SERVICE_ENDPOINT or your "
        "login, else http://localhost:8000.",
    ),
]
Mine = Annotated[bool, Option("--mine", help="Only what is yours.")]
Json = Annotated[bool, Option("--json", group=COMMON, help="Print JSON; docs/how-to/scripts.md shows it.")]
Gpus = Annotated[
    int | None,
    Option(
        "--gpus",
        "-g",
        metavar="NUMBER",
        min=1,
        max=1024,
        help="How many GPUs, all in one machine, all or nothing. By default 1; inside a lease all that it has.",
    ),
]


def _gpu_names(text: str) -> tuple[str, ...]:
    from gpu_worker_pool.core.model.request import as_gpu_names, is_gpu_name  # noqa: PLC0415 - only where it is used

    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = next((name for name in names if not is_gpu_name(name)), None if names else text)
    if wrong is not None:
        raise ValueError(f"{wrong!r} is not a GPU; write indices or UUIDs, as in 2,3")
    return as_gpu_names(names)


GpuNames = Annotated[
    tuple[str, ...] | None,
    Option(
        "--gpu",
        metavar="2,3",
        parser=_gpu_names,
        group=MORE,
        help="These GPUs, as `status` numbers them; with --gpus 1, one of them.",
    ),
]
MemoryPerGpu = Annotated[
    float | None,
    Option(
        parser=parse_memory_mb,
        metavar="12GB",
        help="Share a GPU, using this much of its memory. Without it, the GPU is yours alone.",
    ),
]
Model = Annotated[
    str | None,
    Option(metavar="A100", help="The kind of GPU: A100; either of several: A100,H100; or a pattern: *80GB*."),
]
MinMemory = Annotated[
    float | None,
    Option(
        "--min-memory",
        parser=parse_memory_mb,
        metavar="40GB",
        group=MORE,
        help="Only a GPU that has at least this much memory; it is yours alone.",
    ),
]
Exclude = Annotated[
    tuple[str, ...] | None,
    Option("--exclude", metavar="3", parser=_gpu_names, group=MORE, help="Not these GPUs, as `status` numbers them."),
]
Priority = Annotated[int, Option("--priority", "-p", metavar="NUMBER", help="Higher goes first.")]
Timeout = Annotated[
    float | None,
    Option(parser=parse_duration_s, metavar="1h", help="How long to wait for GPUs; by default as long as it takes."),
]


def _time_limit_s(text: str) -> float:
    seconds = parse_duration_s(text)
    if seconds < 1:
        raise ValueError(f"{text!r} is too short; a time limit must be at least 1s")
    return seconds


TimeLimit = Annotated[
    float | None,
    Option(
        "--time",
        parser=_time_limit_s,
        metavar="2h",
        help="End the lease after this time: SIGTERM a minute before, SIGKILL at the limit. Short requests may start sooner.",
    ),
]
Preemptible = Annotated[
    bool,
    Option(
        "--preemptible",
        help="Use idle GPUs beyond your quota. The lease ends, after a warning, when another request needs them.",
    ),
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
        help="Inside another run or batch: request new GPUs instead of those of the outer lease.",
    ),
]


Name = Annotated[
    str | None,
    Option("--name", "-n", metavar="TEXT", help="The name that others see in `status`."),
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
    bool,
    Option("--ssh", group=MORE, help="With --nodes: also start the command on the other boxes, with your own ssh."),
]
EnvNames = Annotated[
    list[str] | None,
    Option("--env", metavar="NAME", group=MORE, help="With --ssh or --anywhere: pass this variable on; repeatable."),
]
Anywhere = Annotated[
    bool,
    Option(
        "--anywhere",
        group=MORE,
        help="On any box of the fleet: your own ssh starts the command there, in this directory. GPU_POOL_ANYWHERE=true makes "
        "it the default.",
    ),
]
OnGranted = Annotated[
    str | None,
    Option(
        "--on-granted",
        metavar="PROGRAM",
        group=MORE,
        help="Run this program beside the command once it has its GPUs. No shell reads it; for one, write \"sh -c '...'\".",
    ),
]
Notify = Annotated[
    list[str] | None,
    Option(
        "--notify",
        metavar="URL",
        group=MORE,
        help="Send a notice when GPUs are granted, when the lease is about to end or is lost, and at the end: "
        "ntfy://TOPIC, slack://..., mailto://... or "
        "any other Apprise URL, or the name of a variable that holds one; repeatable.",
    ),
]
Retries = Annotated[
    int,
    Option("--retries", "-r", metavar="NUMBER", min=0, max=1000, help="How often to run a failed job again."),
]


@dataclass(frozen=True, kw_only=True)
class GpuWishes:
    """Which GPUs: for every command that takes some."""

    gpus: Gpus = None
    gpu: GpuNames = None
    memory: MemoryPerGpu = None
    model: Model = None
    min_memory: MinMemory = None
    exclude: Exclude = None
    endpoint: Endpoints = None

    @property
    def number(self) -> int:
        """How many, as it was typed or as the names say; 1 by default."""
        return self.gpus or len(self.gpu or ()) or 1


@dataclass(frozen=True, kw_only=True)
class GpuOptions(GpuWishes):
    """What `run`, `batch` and `submit` ask for."""

    priority: Priority = 0
    timeout: Timeout = None
    time: TimeLimit = None
    preemptible: Preemptible = False
    grace: Grace = 10.0
    remote: Remote = False


@dataclass(frozen=True, kw_only=True)
class CommandOptions(GpuOptions):
    """What `run` and `submit` ask for, for one command that may be on several boxes, and whom they tell."""

    name: Name = None
    anywhere: Anywhere = False
    nodes: Nodes = 1
    ssh: Ssh = False
    env: EnvNames = None
    on_granted: OnGranted = None
    notify: Notify = None
