"""A server with the AMD GPUs of the tree that AMD_TREE names: `python -m` this."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from gpu_worker_pool.gpus.amd import AmdProbe
from gpu_worker_pool.server.app import create_app
from tests.server.elsewhere import serve

COMMAND = (sys.executable, "-m", "tests.gpus.amd_server")

if __name__ == "__main__":
    serve(create_app(make_probe=lambda: AmdProbe(socket.gethostname(), root=Path(os.environ["AMD_TREE"]))))
