"""The version of this program. The package itself imports the client, which the server does not use."""

from __future__ import annotations

from importlib import import_module

VERSION: str = import_module("gpu_worker_pool").__version__
