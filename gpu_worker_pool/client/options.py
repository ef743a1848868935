"""What can be asked for, and how a client can be configured: by name, for every function that takes it on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import TypedDict

from gpu_worker_pool.config import EndpointOptions
from gpu_worker_pool.models import Assignment

from .events import Hook


class RequestWishes(TypedDict, total=False):
    """What can be asked for; see `GPUWorkerPoolClient.request_gpu`."""

    gpus: int
    memory_mb: float | None
    memory: str | float | None
    model: str | None
    min_memory_mb: float | None
    min_memory: str | float | None
    among: Iterable[int | str] | None
    exclude: Iterable[int | str] | None
    priority: int
    labels: Mapping[str, str] | None
    pid: int | None
    new: bool
    time_limit: float | str | None
    preemptible: bool
    nodes: int


class PoolOptions(EndpointOptions, total=False):
    """The options of a client other than `service_endpoint`; see `GPUWorkerPoolClient`."""

    on_lost: Callable[[Assignment], None] | None
    on_ending: Callable[[Assignment], None] | None
    on_event: Hook | None


class ClientOptions(PoolOptions, total=False):
    """All options of a client."""

    service_endpoint: str | None


class LeaseOptions(RequestWishes, ClientOptions, total=False):
    """What can be asked for, and the options of the client that asks."""


def split(function: str, asked: LeaseOptions) -> tuple[RequestWishes, ClientOptions]:
    """The wishes of a request, and the options of its client; TypeError where the function knows none of that name."""
    check_names(function, asked, LeaseOptions)
    wishes: RequestWishes = {}
    options: ClientOptions = {}
    for name, value in asked.items():
        (wishes if name in RequestWishes.__annotations__ else options)[name] = value  # type: ignore[literal-required]
    return wishes, options


def check_names(function: str, asked: Mapping[str, object], options: type) -> None:
    """Raise TypeError where the function knows no option of that name."""
    known = options.__annotations__
    for name in asked.keys() - known.keys():
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"
        raise TypeError(f"{function}() does not know {name!r}; {hint}")
