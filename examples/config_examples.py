"""How a client is configured, what is checked, and how a mistake reads. No server is needed.

A value comes from the constructor, else from the environment, else it is the default. A bad value in the constructor is
a ValueError, because you are there to see it. A bad value in the environment is logged, and the default is used.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import Any

from gpu_worker_pool import GPUWorkerPoolClient
from gpu_worker_pool.config import ClientConfig

MISTAKES: tuple[dict[str, Any], ...] = (
    {"memory_threshold": 120},
    {"utilization_threshold": "high"},
    {"polling_interval": 0},
    {"load_balancing_strategy": "fastest"},
    {"service_endpoint": "gpu-1:8000/with a space"},
    {"service_endpoint": "ftp://gpu-1"},
    {"service_endpoints": ""},
    {"endpoint_max_retries": 2.5},
    {"service_endpoint": "http://gpu-1:8000", "token": {"gpu-2": "a-secret-token"}},
)

ENVIRONMENTS: dict[str, dict[str, str]] = {
    "nothing is set": {},
    "one server": {"GPU_SERVICE_ENDPOINT": "http://gpu-1:8080"},
    "both are set, and the plural wins": {
        "GPU_SERVICE_ENDPOINT": "http://gpu-1:8080",
        "GPU_STATS_SERVICE_ENDPOINTS": "http://gpu-2:8000, http://gpu-3:8000",
        "GPU_LOAD_BALANCING_STRATEGY": "round_robin",
    },
    "one server in the plural is one server": {"GPU_STATS_SERVICE_ENDPOINTS": "http://gpu-2:8000"},
    "thresholds": {"GPU_MEMORY_THRESHOLD_PERCENT": "70", "GPU_UTILIZATION_THRESHOLD_PERCENT": "80"},
    "mistakes, which are logged": {
        "GPU_STATS_SERVICE_ENDPOINTS": "http://gpu-2:8000,ftp://gpu-3",
        "GPU_MEMORY_THRESHOLD_PERCENT": "a lot",
        "GPU_POLLING_INTERVAL": "-5",
    },
}


def show(config: ClientConfig) -> None:
    """Print the settings that differ between these examples."""
    servers = ", ".join(f"{endpoint_id} at {endpoint.url}" for endpoint_id, endpoint in config.endpoints.items())
    mode = "several servers" if config.is_multi else "one server"
    print(f"    {mode}: {servers}; strategy {config.strategy}")
    print(
        f"    granted below {config.memory_threshold:g} % memory and {config.utilization_threshold:g} % utilization; "
        f"a poll every {config.polling_interval:g} s"
    )


def from_the_environment() -> None:
    """Read the variables that the documents name."""
    print("From the environment")
    for name, variables in ENVIRONMENTS.items():
        print(f"\n  {name}: {' '.join(f'{key}={value!r}' for key, value in variables.items())}")
        show(ClientConfig.build(environ=variables))


def from_the_constructor() -> None:
    """Show that the constructor wins over the environment, value by value."""
    print("\nThe constructor wins over the environment")
    os.environ["GPU_SERVICE_ENDPOINT"] = "http://of-the-environment:8000"
    os.environ["GPU_MEMORY_THRESHOLD_PERCENT"] = "60"
    client = GPUWorkerPoolClient("http://of-the-constructor:8000")
    print(f"  {client!r}")
    show(ClientConfig.build(service_endpoint="http://of-the-constructor:8000", environ=os.environ))


def mistakes() -> None:
    """Print the errors: each names the parameter, its value, and the range."""
    print("\nMistakes in the constructor")
    for options in MISTAKES:
        try:
            GPUWorkerPoolClient(**options)
        except ValueError as error:
            print(f"  ValueError: {error}")
        else:
            sys.exit(f"{options} should have been refused")


if __name__ == "__main__":
    argparse.ArgumentParser(
        description="How a client is configured, what is checked, how a mistake reads."
    ).parse_args()
    logging.basicConfig(stream=sys.stdout, format="    %(levelname)s: %(message)s")
    from_the_environment()
    from_the_constructor()
    mistakes()
