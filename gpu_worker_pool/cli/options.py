"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from .units import parse_duration_s, parse_memory_mb

Endpoints = Annotated[
    list[str] | None,
    typer.Option(
        "--endpoint",
        "-e",
        metavar="URL",
        help="A GPU server, or several: again, or separated by commas. Otherwise GPU_STATS_SERVICE_ENDPOINTS, "
        "GPU_SERVICE_ENDPOINTS, GPU_SERVICE_ENDPOINT, or http://localhost:8000, the first that there is.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, as docs/CLI.md describes it.")]
Gpus = Annotated[
    int, typer.Option("--gpus", "-g", min=1, max=1024, help="How many, all in one machine, all or nothing.")
]
Memory = Annotated[
    float | None,
    typer.Option(
        parser=parse_memory_mb,
        metavar="12GB",
        help="Share a GPU with others who say how much they need, and use this much of it. Without it, it is yours alone.",
    ),
]
Model = Annotated[str | None, typer.Option(metavar="A100", help="A word of the GPU's name, or a pattern: `*80GB*`.")]
Priority = Annotated[int, typer.Option("--priority", "-p", help="Higher is served first.")]
Timeout = Annotated[
    float | None,
    typer.Option(
        parser=parse_duration_s, metavar="1h", help="How long to wait for GPUs at most; else as long as it takes."
    ),
]
Grace = Annotated[
    float,
    typer.Option(
        parser=parse_duration_s,
        metavar="10s",
        help="What a command has between SIGTERM and SIGKILL; less where its GPU would be somebody else's before.",
    ),
]
Remote = Annotated[
    bool,
    typer.Option(
        "--remote",
        help="Take GPUs of other machines too, though the command runs on this one: for one that goes there itself.",
    ),
]


class OnLost(StrEnum):
    """What to do with a command when its lease is lost."""

    STOP = "stop"
    FINISH = "finish"


WhenLost = Annotated[
    OnLost,
    typer.Option(
        "--on-lost", help="When the lease is lost: stop the command (SIGTERM, then SIGKILL), or let it finish without."
    ),
]
