"""The entry to the server that the documents name.

python -m gpu_worker_pool.gpu_server
uvicorn gpu_worker_pool.gpu_server:app --host 0.0.0.0 --port 8000
python gpu_worker_pool/gpu_server.py
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in {None, ""}:
    # Run as a script: Python put this folder on the path, where the one above it belongs.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import logging
import socket
from typing import Final

import uvicorn

from gpu_worker_pool.server.app import PoolApp, create_app
from gpu_worker_pool.server.logs import configure_logging
from gpu_worker_pool.server.protocol import BoundedProtocol
from gpu_worker_pool.server.settings import ServerSettings, get_bool_env, get_float_env, get_int_env

__all__ = ["app", "get_bool_env", "get_float_env", "get_int_env", "main"]

logger = logging.getLogger("gpu_worker_pool.gpu_server")  # also where this module is "__main__"

# A long poll or a stream that is open when the server is asked to stop is cut off after this.
GRACE_S: Final = 1

app: PoolApp = create_app()


def main() -> int:
    """Serve until told to stop; the exit code for the shell."""
    settings = app.settings
    configure_logging(settings)
    if settings.workers > 1:
        logger.warning(
            "WORKERS=%d: one process is the authority over the GPUs and serves everybody; starting one",
            settings.workers,
        )
    try:
        listener = _listen(settings)
    except OSError as error:
        print(f"gpu-worker-pool: cannot listen on {settings.host}:{settings.port}: {_advice(error)}", file=sys.stderr)  # noqa: T201
        return 1
    if settings.reload:
        listener.close()
        uvicorn.run(
            "gpu_worker_pool.gpu_server:app",
            host=settings.host,
            port=settings.port,
            reload=True,
            log_config=None,
            log_level=settings.log_level,
            access_log=settings.access_log,
        )
        return 0
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=settings.log_level,
        access_log=settings.access_log,
        timeout_graceful_shutdown=GRACE_S,
        # Whether a call was passed on is for us to judge, by the headers that this would take as true.
        proxy_headers=False,
        http=BoundedProtocol,
    )
    host, port = listener.getsockname()[:2]
    logger.info("listening on http://%s:%d%s/", f"[{host}]" if ":" in host else host, port, settings.api_prefix)
    # Listening already: whoever is told that the server is ready can connect from that moment on.
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        return 130  # as a shell reports a program that Ctrl-C ended
    return 0


def _listen(settings: ServerSettings) -> socket.socket:
    """Take the address before anything else, so that a refusal is one clear line."""
    family, kind, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def _advice(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "this is no address of this machine; set HOST to one, or to 0.0.0.0 for all"
    if isinstance(error, PermissionError):
        return "ports below 1024 need more rights; set PORT to a higher one"
    if error.errno == 98:
        return "the port is in use; stop who uses it, or set PORT to another one"
    return f"{error.strerror}; check HOST and PORT"


if __name__ == "__main__":
    sys.exit(main())
