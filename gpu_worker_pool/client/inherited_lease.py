"""The lease inside which this process runs: `gpu-pool run` and `batch` name it in the environment of their commands.

A request inside a lease takes GPUs of that lease without asking a server. Its holder outside keeps it alive, and ends what
runs inside when it is lost. Two requests inside one lease do not get the same GPU: each GPU that is taken has a lock file,
which is free again when the process that took it, and what shares its descriptors, has ended. Requests with an amount of
memory share a GPU with each other.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, Unpack

from gpu_worker_pool.config import ClientConfig, EndpointOptions
from gpu_worker_pool.core.model.bounds import show_mb
from gpu_worker_pool.errors import RequestRefusedError
from gpu_worker_pool.gpus.grant_env import DEVICE_ORDER, PCI_ORDER, GrantedGpu, is_amd, rocm_env
from gpu_worker_pool.host.visible_devices import names_in
from gpu_worker_pool.models import Assignment, make_assignment
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
# Set for what runs on GPUs that were taken inside a lease: requests there take them from it, and not from the whole lease.
LEASE_SCOPE_VARIABLE: Final = "GPU_POOL_LEASE_SCOPE"
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
    # Those that take GPUs from the same scope wait for each other.
    scope: str = ""
    # What each worker of this process has taken and not released: its lock files, and their descriptors.
    _taken: dict[str, dict[str, int]] = field(default_factory=dict, init=False, compare=False)

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

    def take(self, request: Request, *, is_multi: bool, takes_all: bool = False) -> Assignment | None:
        """Take GPUs for a request that these can serve; None where others inside the lease use them. With `takes_all`, all
        that this process sees. RequestRefusedError where that cannot be known.
        """
        gpus: list[LeasedGpu] = []
        locks: dict[str, int] = {}
        count = len(self.gpus) if takes_all else request.wishes.gpus
        for gpu in self._fitting(request.wishes):
            if len(gpus) < count and self._lock(gpu, locks, is_shared=request.wishes.memory_mb is not None):
                gpus.append(gpu)
        if len(gpus) < count:
            _unlock(locks)
            return None
        env = {LEASE_SCOPE_VARIABLE: os.urandom(8).hex()}
        if not takes_all:
            env |= {DEVICE_ORDER: PCI_ORDER, VISIBLE_DEVICES_VARIABLE: ",".join(gpu.device for gpu in gpus)}
            env |= rocm_env([GrantedGpu(gpu.index, gpu.uuid) for gpu in gpus if is_amd(gpu.uuid)])
        self._taken[request.holder.worker_id or ""] = locks
        return self._assignment(request, gpus, env, is_multi=is_multi)

    @property
    def busy_text(self) -> str:
        """Why a request inside it waits."""
        return f"other programs inside the lease {self.id} use its GPUs; {ADVICE}"

    def locks(self, assignment: Assignment) -> list[int]:
        """The descriptors that keep its GPUs from others inside the lease: what may outlive this process must have them."""
        return list(self._taken.get(assignment.worker_id, {}).values())

    def release(self, assignment: Assignment) -> bool:
        """Let others have the GPUs of an assignment; False where it is not one of this lease."""
        if (locks := self._taken.pop(getattr(assignment, "worker_id", ""), None)) is not None:
            _unlock(locks)
        return locks is not None

    def release_all(self) -> None:
        """Let others have all that this process has taken."""
        while self._taken:
            _unlock(self._taken.popitem()[1])

    def _lock(self, gpu: LeasedGpu, locks: dict[str, int], *, is_shared: bool) -> bool:
        """Lock a GPU; False where another one has it."""
        name = f"{self.id}.{self.scope}.{gpu.uuid or gpu.device}".replace("/", "_")
        try:
            descriptor = _lock(path := f"{_lock_folder()}/{name}", is_shared=is_shared)
        except OSError as error:
            _unlock(locks)
            why = f"whether others inside the lease {self.id} use its GPUs is not known: {error}; repair that, or {ADVICE}"
            raise RequestRefusedError({self.endpoint or self.url.host: why}) from None
        if descriptor is not None:
            locks[path] = descriptor
        return descriptor is not None

    def _assignment(
        self, request: Request, gpus: Sequence[LeasedGpu], env: Mapping[str, str], *, is_multi: bool
    ) -> Assignment:
        endpoint, limit_s, now = self.endpoint or self.url.host, request.time_limit_s, datetime.now()  # noqa: DTZ005 - local time, as all times of the documents
        return make_assignment(
            [(endpoint, gpu.index) for gpu in gpus],
            request.holder.worker_id or "",
            now,
            is_multi=is_multi,
            lease_id=self.id,
            fence=self.fence,
            server_url=self.url.url,
            uuids=tuple(gpu.uuid or gpu.device for gpu in gpus),
            memory_mb=self.memory_mb if request.wishes.memory_mb is None else request.wishes.memory_mb,
            env=env,
            ends_at=None if limit_s is None else now + timedelta(seconds=limit_s),
        )

    def _fitting(self, wishes: Wishes) -> list[LeasedGpu]:
        among, exclude = wishes.among, wishes.exclude or ()
        fitting = [gpu for gpu in self.gpus if among is None or any(map(gpu.is_named, among))]
        return [gpu for gpu in fitting if not any(map(gpu.is_named, exclude))]

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
        environ.get(LEASE_SCOPE_VARIABLE, ""),
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


def _lock_folder() -> str:
    """The folder of the lock files: the same for all programs of this user, whatever their environment. OSError where
    another user could have made it.
    """
    uid = os.geteuid()
    run = f"/run/user/{uid}"
    folder = f"{run}/gpu-worker-pool" if os.access(run, os.W_OK) else f"/tmp/gpu-worker-pool-{uid}"  # noqa: S108 - checked
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)  # noqa: PTH102 - quick
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o022:
        raise OSError(f"{folder} is not a folder that only you can write to")
    return folder


def _lock(path: str, *, is_shared: bool) -> int | None:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # its last user has just removed the file


def _unlock(locks: Mapping[str, int]) -> None:
    """Give up the locks, and remove the files that no other process has locked."""
    for path, descriptor in locks.items():
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)  # noqa: PTH108 - quick
        os.close(descriptor)


def config_inside(
    service_endpoint: str | None = None, **given: Unpack[EndpointOptions]
) -> tuple[ClientConfig, InheritedLease | None]:
    """The settings of a client for these endpoints, and the lease around it, if its servers are those that know it.

    Without endpoints from the constructor, a client inside a lease asks the lease's server at the least.
    """
    config, lease = ClientConfig.build(service_endpoint, **given), inherited_lease(os.environ)
    if lease is None or any(map(lease.is_at, config.endpoints.values())):
        return config, lease
    if service_endpoint is not None or given.get("service_endpoints") is not None:
        return config, None
    url = lease.url.url
    given["service_endpoints"] = [url] if config.is_multi else None
    return ClientConfig.build(None if config.is_multi else url, **given), lease
