"""The documented entry points of the server.

python -m gpu_worker_pool.gpu_server
uvicorn gpu_worker_pool.gpu_server:app --host 0.0.0.0 --port 8000
python gpu_worker_pool/gpu_server.py
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in {None, ""}:
    # Run as a script: Python put this folder on the path, but its parent is needed.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import logging

try:
    import uvicorn

    from gpu_worker_pool.server.app import PoolApp, create_app
    from gpu_worker_pool.server.logs import configure_logging
    from gpu_worker_pool.server.serving import advice, listen, run
    from gpu_worker_pool.server.settings import get_bool_env, get_float_env, get_int_env
except ModuleNotFoundError as error:
    # A program that imports this module gets the usual ImportError.
    if __name__ != "__main__" or error.name is None or error.name.startswith("gpu_worker_pool"):
        raise
    sys.exit(f"gpu-worker-pool: {error.name} is not installed; pip install 'gpu-worker-pool[server]'")

__all__ = ["app", "get_bool_env", "get_float_env", "get_int_env", "main"]

logger = logging.getLogger("gpu_worker_pool.gpu_server")  # also where this module is "__main__"

app: PoolApp = create_app()


def main() -> int:
    """Serve until stopped; return the exit code."""
    settings = app.settings
    configure_logging(settings)
    if settings.workers > 1:
        logger.warning(
            "WORKERS=%d: one process is the authority over the GPUs and serves all clients; starting one",
            settings.workers,
        )
    try:
        listener = listen(settings)
    except OSError as error:
        print(f"gpu-worker-pool: cannot listen on {settings.host}:{settings.port}: {advice(error)}", file=sys.stderr)  # noqa: T201
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
    return run(app, listener)


if __name__ == "__main__":
    sys.exit(main())
