"""The lease inside which this process runs: `gpu-pool run` and `batch` name it in the environment of their commands."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.urls import EndpointUrl, parse_endpoint

LEASE_ID_VARIABLE: Final = "GPU_POOL_LEASE_ID"
LEASE_URL_VARIABLE: Final = "GPU_POOL_LEASE_URL"


@dataclass(frozen=True)
class InheritedLease:
    """The id of the lease, and the server that granted it."""

    id: str
    url: EndpointUrl

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
        return InheritedLease(lease_id, parse_endpoint(url))
    except ValueError as error:
        raise ValueError(f"{LEASE_URL_VARIABLE}: {error}; unset {LEASE_ID_VARIABLE} to ask for other GPUs") from None


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
