"""A server that takes its own machine for another one than this, so that its holders are remote: `python -m` this."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from typing import NoReturn

from gpu_worker_pool.host.processes import Machine
from gpu_worker_pool.server.app import PoolApp, create_app
from gpu_worker_pool.server.logs import configure_logging
from gpu_worker_pool.server.serving import listen, run

COMMAND = (sys.executable, "-m", "tests.server.elsewhere")


def serve(app: PoolApp) -> NoReturn:
    """Run this application until the caller ends, or ends it."""
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    configure_logging(app.settings)
    sys.exit(run(app, listen(app.settings)))


def _end_with_the_caller() -> None:
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    serve(create_app(machine=replace(Machine.here(), boot_id="another machine")))
