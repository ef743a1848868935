"""A server that takes its own machine for another one than this, so that its holders are remote: `python -m` this."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace

from gpu_worker_pool.host.identity import Machine
from gpu_worker_pool.server.app import create_app
from gpu_worker_pool.server.logs import configure_logging
from gpu_worker_pool.server.serving import listen, run

COMMAND = (sys.executable, "-m", "tests.server.elsewhere")


def _end_with_the_caller() -> None:
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    app = create_app(machine=replace(Machine.here(), boot_id="another machine"))
    configure_logging(app.settings)
    sys.exit(run(app, listen(app.settings)))
