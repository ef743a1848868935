"""The lease inside which this process runs: `gpu-pool run` and `batch` name it in the environment of their commands.

A request inside a lease takes GPUs of that lease without asking a server. Its holder outside keeps it alive, and ends what
runs inside when it is lost.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.core.model.bounds import show_mb
from gpu_worker_pool.host.visible_devices import names_in
from gpu_worker_pool.models import GlobalGPUAssignment, GPUAssignment
from gpu_worker_pool.urls import EndpointUrl, parse_endpoint

if TYPE_CHECKING:
    from gpu_worker_pool.core.model.request import Request, Wishes

LEASE_ID_VARIABLE: Final = "GPU_POOL_LEASE_ID"
LEASE_URL_VARIABLE: Final = "GPU_POOL_LEASE_URL"
LEASE_GPUS_VARIABLE: Final = "GPU_POOL_LEASE_GPUS"
LEASE_UUIDS_VARIABLE: Final = "GPU_POOL_LEASE_UUIDS"
LEASE_MEMORY_VARIABLE: Final = "GPU_POOL_LEASE_MEMORY_MB"
LEASE_ENDPOINT_VARIABLE: Final = "GPU_POOL_LEASE_ENDPOINT"
LEASE_FENCE_VARIABLE: Final = "GPU_POOL_LEASE_FENCE"
VISIBLE_DEVICES_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
ADVICE: Final = "to ask for other GPUs, use --new (Python: new=True)"


@dataclass(frozen=True, slots=True)
class LeasedGpu:
    """A GPU of the lease. `device` is its name in CUDA_VISIBLE_DEVICES; the UUID is empty where it is not known."""

    index: int
    uuid: str
    device: str

    def is_named(self, name: str) -> bool:
        """Whether this is its index, its UUID or the beginning of it."""
        return name.lstrip("0") == str(self.index).lstrip("0") if name.isdigit() else self.uuid.startswith(name)


@dataclass(frozen=True)
class InheritedLease:
    """A lease, the server that granted it, and those of its GPUs that this process sees. `memory_mb` is that of a share."""

    id: str
    url: EndpointUrl
    gpus: tuple[LeasedGpu, ...]
    memory_mb: float | None = None
    endpoint: str = ""
    fence: int | None = None
    # What this process has taken and not released.
    _taken: list[GPUAssignment | GlobalGPUAssignment] = field(default_factory=list, init=False, compare=False)

    def why_not(self, wishes: Wishes) -> str | None:
        """Why its GPUs cannot serve such a request; None if they can."""
        has = f"{len(self.gpus)} GPU{'' if len(self.gpus) == 1 else 's'}"
        fitting = len(self._fitting(wishes))
        if wishes.nodes > 1 or wishes.gpus > fitting:
            if fitting < len(self.gpus):
                has += f", {fitting} of them among those asked for"
        elif self.memory_mb is not None and (wishes.memory_mb or 0.0) > self.memory_mb:
            has += f" with {show_mb(self.memory_mb)}"
        else:
            return None
        return f"the lease {self.id} around this program has {has}, not {wishes}; {ADVICE}"

    def take(self, request: Request, *, is_multi: bool) -> GPUAssignment | GlobalGPUAssignment:
        """Take GPUs for a request that these can serve: those that this process uses least."""
        used = [uuid for taken in self._taken for uuid in taken.uuids]
        fitting = sorted(self._fitting(request.wishes), key=lambda gpu: used.count(gpu.uuid or gpu.device))
        gpus = sorted(fitting[: request.wishes.gpus], key=self.gpus.index)
        taken = self.assignment(request, gpus, is_multi=is_multi)
        taken.env = {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            VISIBLE_DEVICES_VARIABLE: ",".join(gpu.device for gpu in gpus),
        }
        self._taken.append(taken)
        return taken

    def release(self, assignment: GPUAssignment | GlobalGPUAssignment) -> bool:
        """Note that an assignment is not used any more; False where it is not one of this lease."""
        if assignment not in self._taken:
            return False
        self._taken.remove(assignment)
        return True

    def assignment(
        self, request: Request, gpus: Sequence[LeasedGpu], *, is_multi: bool
    ) -> GPUAssignment | GlobalGPUAssignment:
        """These GPUs for a request, with the environment as it is."""
        worker_id, first = request.holder.worker_id or "", gpus[0].index
        endpoint = self.endpoint or self.url.host
        where = {"global_gpu_id": f"{endpoint}:{first}", "endpoint_id": endpoint}
        now = datetime.now()  # noqa: DTZ005 - local time, as all times of the documents
        found: GPUAssignment | GlobalGPUAssignment
        if is_multi:
            found = GlobalGPUAssignment(**where, local_gpu_id=first, worker_id=worker_id, assigned_at=now)
        else:
            found = GPUAssignment(first, worker_id, now, **where, local_gpu_id=first)
        found.gpu_ids = tuple(f"{endpoint}:{gpu.index}" if is_multi else gpu.index for gpu in gpus)
        found.lease_id, found.fence, found.server_url = self.id, self.fence, self.url.url
        found.uuids = tuple(gpu.uuid or gpu.device for gpu in gpus)
        found.memory_mb = self.memory_mb if request.wishes.memory_mb is None else request.wishes.memory_mb
        if request.time_limit_s is not None:
            found.ends_at = now + timedelta(seconds=request.time_limit_s)
        return found

    def _fitting(self, wishes: Wishes) -> list[LeasedGpu]:
        among = wishes.among
        return [gpu for gpu in self.gpus if among is None or any(gpu.is_named(name) for name in among)]

    def is_at(self, url: EndpointUrl) -> bool:
        """Whether this URL is that of the lease's server; this machine has several names."""
        if url.identity == self.url.identity:
            return True
        from gpu_worker_pool.host.addresses import is_this_machine  # noqa: PLC0415 - it loads much, and few need it

        is_same = (url.is_https, url.port, url.path) == (self.url.is_https, self.url.port, self.url.path)
        return is_same and is_this_machine(url.host) and is_this_machine(self.url.host)

    def is_among(self, urls: Iterable[EndpointUrl]) -> bool:
        """Whether one of these URLs is that of the lease's server."""
        return any(map(self.is_at, urls))


def inherited_lease(environ: Mapping[str, str]) -> InheritedLease | None:
    """The lease that the environment names; None if there is none, or if no server granted it.

    A ValueError says what is wrong with the variables: to go on without the lease could take a second GPU.
    """
    lease_id, url = environ.get(LEASE_ID_VARIABLE, "").strip(), environ.get(LEASE_URL_VARIABLE, "").strip()
    if not lease_id or not url:
        return None
    try:
        where = parse_endpoint(url)
    except ValueError as error:
        raise ValueError(f"{LEASE_URL_VARIABLE}: {error}; unset {LEASE_ID_VARIABLE} to ask for other GPUs") from None
    fence, memory = environ.get(LEASE_FENCE_VARIABLE, ""), environ.get(LEASE_MEMORY_VARIABLE, "")
    endpoint = environ.get(LEASE_ENDPOINT_VARIABLE, "")
    return InheritedLease(
        lease_id,
        where,
        _visible_gpus(environ),
        float(memory) if memory else None,
        endpoint,
        int(fence) if fence.isdigit() else None,
    )


def _visible_gpus(environ: Mapping[str, str]) -> tuple[LeasedGpu, ...]:
    """The GPUs of the lease that CUDA_VISIBLE_DEVICES names: the lease has set it, and a user may have since."""
    value = environ.get(VISIBLE_DEVICES_VARIABLE)
    names = None if value is None else names_in(value)[0]
    ids = [text.rpartition(":")[2] for text in environ.get(LEASE_GPUS_VARIABLE, "").split(",") if text]
    uuids = [text for text in environ.get(LEASE_UUIDS_VARIABLE, "").split(",") if text] or [""] * len(ids)
    if not ids:
        ids, uuids = [name for name in names or () if name.isdigit()], [""] * len(names or ())
    gpus = []
    with suppress(ValueError):  # other programs may have set them
        gpus = [LeasedGpu(int(index), uuid, index) for index, uuid in zip(ids, uuids, strict=False)]
    if names is None:
        return tuple(gpus)
    return tuple(LeasedGpu(gpu.index, gpu.uuid, name) for name in names for gpu in gpus if gpu.is_named(name))


def config_inside(
    build: Callable[..., ClientConfig], single: str | None, several: str | Sequence[str] | None
) -> tuple[ClientConfig, InheritedLease | None]:
    """The settings of a client for these endpoints, and the lease around it, if its servers are those that know it.

    Without endpoints from the constructor, a client inside a lease asks the lease's server at the least.
    """
    config, lease = build(service_endpoint=single, service_endpoints=several), inherited_lease(os.environ)
    if lease is None or lease.is_among(config.endpoints.values()):
        return config, lease
    if single is not None or several is not None:
        return config, None
    url = lease.url.url
    return build(service_endpoints=[url]) if config.is_multi else build(service_endpoint=url), lease
