"""Runs the application, for every command that serves."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable
from typing import Final

import uvicorn

from gpu_worker_pool.host.addresses import urls

from .app import PoolApp
from .http.protocol import BoundedProtocol
from .settings import ServerSettings

logger = logging.getLogger(__name__)

# A long poll or a stream that is open when the server stops is cut off after this time.
GRACE_S: Final = 1


def bind(settings: ServerSettings, *, backlog: int | None = None) -> socket.socket:
    """Bind the address, and listen only with a backlog; OSError if it cannot be had (see `advice`)."""
    family, kind, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
    taken = socket.socket(family, kind)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind(address)
        if backlog is not None:
            taken.listen(backlog)
    except OSError:
        taken.close()
        raise
    return taken


def listen(settings: ServerSettings) -> socket.socket:
    """Listen before anything else starts, so that a failure is one clear line."""
    return bind(settings, backlog=2048)


def advice(error: OSError, *, host: str = "HOST", port: str = "PORT") -> str:
    """Say what is wrong with an address and what to do. `host` and `port` are the names of the user's settings."""
    if isinstance(error, socket.gaierror):
        return f"this is not an address of this machine; set {host} to one, or to 0.0.0.0 for all"
    if isinstance(error, PermissionError):
        return f"ports below 1024 need more rights; set {port} to a higher one"
    if error.errno == errno.EADDRINUSE:
        return f"the port is in use; use the GPU server that runs there, or set {port} to another one if it is not one"
    return f"{error.strerror}; check {host} and {port}"


def run(app: PoolApp, listener: socket.socket, on_ready: Callable[[], None] | None = None) -> int:
    """Serve until stopped, and return the exit code. SystemExit if the application cannot start (`why_not_started`).

    `on_ready` is called in the event loop, once the first sample is taken, the leases are loaded and calls are answered.
    """
    settings = app.settings
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=settings.log_level,
        access_log=settings.access_log,
        timeout_graceful_shutdown=GRACE_S,
        # The access rules judge proxies by the headers; uvicorn would trust those headers.
        proxy_headers=False,
        http=BoundedProtocol,
        ws="none",
    )
    host, port = listener.getsockname()[:2]
    app.locks.url = urls(host, port, settings.api_prefix, names=())[0]
    logger.info("listening on http://%s:%d%s/", f"[{host}]" if ":" in host else host, port, settings.api_prefix)
    # The socket listens already, so a client that is told of READY can connect at once.
    try:
        _Server(config, on_ready).run(sockets=[listener])
    except KeyboardInterrupt:
        return 130  # a shell's exit code for Ctrl-C
    return 0


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None] | None) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started and self._on_ready is not None:
            self._on_ready()
