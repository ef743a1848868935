"""Running the application: one way for every command that does."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable
from typing import Final

import uvicorn

from .app import PoolApp
from .http.protocol import BoundedProtocol
from .settings import ServerSettings

logger = logging.getLogger(__name__)

# A long poll or a stream that is open when the server is asked to stop is cut off after this.
GRACE_S: Final = 1


def bind(settings: ServerSettings) -> socket.socket:
    """Take the address, without letting anybody in yet; an OSError where it is not to be had (see `advice`)."""
    family, kind, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
    taken = socket.socket(family, kind)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind(address)
    except OSError:
        taken.close()
        raise
    return taken


def listen(settings: ServerSettings) -> socket.socket:
    """Take the address before anything else, so that a refusal is one clear line."""
    listener = bind(settings)
    try:
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def advice(error: OSError, *, host: str = "HOST", port: str = "PORT") -> str:
    """What is wrong with an address and what to do; `host` and `port` are what its user sets them by."""
    if isinstance(error, socket.gaierror):
        return f"this is no address of this machine; set {host} to one, or to 0.0.0.0 for all"
    if isinstance(error, PermissionError):
        return f"ports below 1024 need more rights; set {port} to a higher one"
    if error.errno == errno.EADDRINUSE:
        return f"the port is in use; stop who uses it, or set {port} to another one"
    return f"{error.strerror}; check {host} and {port}"


def run(app: PoolApp, listener: socket.socket, on_ready: Callable[[], None] | None = None) -> int:
    """Serve until told to stop; the exit code for the shell. SystemExit where the application cannot start: its
    `why_not_started` says why.

    `on_ready` is called once, in the event loop, when the first look was taken, the leases are there and who connects is
    answered.
    """
    settings = app.settings
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=settings.log_level,
        access_log=settings.access_log,
        timeout_graceful_shutdown=GRACE_S,
        # Whether a call was passed on is for us to judge, by the headers that this would take as true.
        proxy_headers=False,
        http=BoundedProtocol,
        ws="none",
    )
    host, port = listener.getsockname()[:2]
    logger.info("listening on http://%s:%d%s/", f"[{host}]" if ":" in host else host, port, settings.api_prefix)
    # Listening already: whoever is told that the server is ready can connect from that moment on.
    try:
        _Server(config, on_ready).run(sockets=[listener])
    except KeyboardInterrupt:
        return 130  # as a shell reports a program that Ctrl-C ended
    return 0


class _Server(uvicorn.Server):
    """uvicorn's, which tells when it has started."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None] | None) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started and self._on_ready is not None:
            self._on_ready()
