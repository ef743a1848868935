"""Runs the application, for every command that serves."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Final

import uvicorn

from gpu_worker_pool.host.addresses import is_every_address, is_this_machine, urls
from gpu_worker_pool.host.unix_socket import SocketUnusable, UnixListener, server_socket
from gpu_worker_pool.wire.bounds import CLIENT_IDLE_S

from .agent.frames import MOST_BYTES_OF_STRANGER
from .app import PoolApp
from .http.protocol import BoundedProtocol
from .settings import ServerSettings

logger = logging.getLogger(__name__)

# A long poll or a stream that is open when the server stops is cut off after this time.
GRACE_S: Final = 1
# Where commands look for a server without being told.
DEFAULT_URL: Final = "http://localhost:8000"
BACKLOG: Final = 2048
# Leases, readings and connections live long, and are not garbage. Python looks through them after 700 new objects.
OBJECTS_UNTIL_COLLECTION: Final = 5_000


def bind(settings: ServerSettings, *, backlog: int | None = None) -> socket.socket:
    """Bind the address, and listen only with a backlog; OSError if it cannot be had (see `advice`)."""
    family, kind, protocol, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
    # With its protocol: otherwise asyncio does not know that it is TCP, and the end of an answer waits for an ACK.
    taken = socket.socket(family, kind, protocol)
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
    return bind(settings, backlog=BACKLOG)


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
    config = configuration(app)
    host, port = listener.getsockname()[:2]
    app.port = port
    app.locks.url = urls(host, port, settings.api_prefix, names=())[0]
    logger.info("listening on http://%s:%d%s/", f"[{host}]" if ":" in host else host, port, settings.api_prefix)
    unix = _listen_unix(app, port)

    def ready() -> None:
        if app.pool.is_open and app.tokens.is_unset and not is_this_machine(host):
            # Also for a server on one address alone: commands on this machine find its Unix socket by that.
            url = urls("localhost", port, settings.api_prefix, names=())[0]
            how = f"To allow a user: gpu-pool token add NAME{'' if url == DEFAULT_URL else f' --endpoint {url}'}"
            if unix is None and not is_every_address(host):
                how = "Set GPU_POOL_TOKENS_FILE: without a Unix socket, no caller of this machine can make one"
            logger.warning(
                "other machines can view but not request GPUs: there is no token yet. %s",
                how,
                extra={"in_banner": True},
            )
        if on_ready is not None:
            on_ready()

    # The sockets listen already, so a client that is told of READY can connect at once.
    try:
        _Server(config, ready, unix).run(sockets=[listener, *([unix.socket] if unix else [])])
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return 130  # a shell's exit code for Ctrl-C
    return 0


def collect_garbage_seldom() -> None:
    """Keep garbage collections short: while one lasts, the event loop stands still. What is loaded now is never garbage."""
    gc.set_threshold(OBJECTS_UNTIL_COLLECTION)
    gc.freeze()


def configuration(app: PoolApp) -> uvicorn.Config:
    """What uvicorn is told of the application."""
    return uvicorn.Config(
        app,
        log_config=None,
        log_level=app.settings.log_level,
        access_log=app.settings.access_log,
        timeout_graceful_shutdown=GRACE_S,
        # The client is the one to close: a server that does it first meets the next request on its way.
        timeout_keep_alive=round(2 * CLIENT_IDLE_S),
        # The access rules judge proxies by the headers; uvicorn would trust those headers.
        proxy_headers=False,
        http=_protocol_of(app),
        # Only for agents of a fleet; their messages say that they are there.
        ws=_link_protocol() if app.websocket_path else "none",
        ws_max_size=MOST_BYTES_OF_STRANGER,
        ws_ping_interval=None,
        ws_per_message_deflate=False,
    )


def _protocol_of(app: PoolApp) -> type[BoundedProtocol]:
    path = app.websocket_path
    own = {"websocket_path": path and path.encode()}
    return type("PoolProtocol", (BoundedProtocol,), own)


def _link_protocol() -> type:
    from .leader.endpoint import LinkProtocol  # noqa: PLC0415 - it loads what a server without a fleet does not need

    return LinkProtocol


def _listen_unix(app: PoolApp, port: int) -> UnixListener | None:
    """Listen on the Unix socket as well, if there is to be one. A server without it goes on, and says why."""
    path = server_socket(app.settings.gpu_pool_socket, os.environ, port=port, uid=os.geteuid())
    unix = None
    try:
        unix = None if path is None else UnixListener(path, backlog=BACKLOG)
    except SocketUnusable as why:
        logger.warning("no Unix socket: %s", why)
    if unix is not None:
        app.access.socket = str(unix.path)
        logger.info("listening on the Unix socket %s", unix.path)
    elif not app.access.takes_loopback:
        logger.error("GPU_POOL_LOCAL=socket, and there is no Unix socket: only callers with a token may request GPUs")
    return unix


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None], unix: UnixListener | None) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._unix = unix

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn takes a second Ctrl-C for a wish not to stop cleanly. A clean stop takes a few seconds at most.
        if not self.should_exit:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Here, because uvicorn raises the signal that stopped it once more.
        if self._unix is not None:
            self._unix.remove()
        await super().shutdown(sockets=sockets)
        # uvicorn ends the process by that signal, without an end of the log.
        for handler in logging.getLogger("uvicorn").handlers:
            handler.flush()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        collect_garbage_seldom()
        if self.started:
            self._on_ready()
