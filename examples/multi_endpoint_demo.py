"""Patterns of configuration for several GPU servers, checked and shown without any server.

A client that is not started makes no call. So this runs anywhere. Copy from it what you need.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from gpu_worker_pool import GPUWorkerPoolClient
from gpu_worker_pool.client.endpoints.balancing import Balancer, EndpointView
from gpu_worker_pool.config import STRATEGIES, ClientConfig

# The parameters of GPUWorkerPoolClient(...), by pattern.
PATTERNS: dict[str, dict[str, Any]] = {
    "Production: three alike, careful thresholds, long waits": {
        "service_endpoints": "http://gpu-1:8000,http://gpu-2:8000,http://gpu-3:8000",
        "load_balancing_strategy": "availability",
        "memory_threshold": 70.0,
        "utilization_threshold": 80.0,
        "worker_timeout": 600.0,
    },
    "Development: every server gets its turn, and requests give up early": {
        "service_endpoints": ["http://dev-1:8000", "http://dev-2:8000"],
        "load_balancing_strategy": "round_robin",
        "worker_timeout": 30.0,
    },
    "Batch: servers of different sizes, GPUs filled to the brim": {
        "service_endpoints": "http://large:8000,http://small:8000",
        "load_balancing_strategy": "weighted",
        "memory_threshold": 90.0,
        "utilization_threshold": 95.0,
        "worker_timeout": 3600.0,
    },
    "Far away: slow networks, longer time-outs and more retries": {
        "service_endpoints": "https://berlin.example.org,https://tokyo.example.org/gpu",
        "endpoint_timeout": 20.0,
        "endpoint_max_retries": 5,
        "token": {"berlin.example.org": "a-token-of-berlin", "tokyo.example.org": "a-token-of-tokyo"},
    },
    "Several servers on one machine: their ids contain the port": {
        "service_endpoints": "http://localhost:8000,http://localhost:8001",
    },
    "From one server to several: one is enough to get global ids": {
        "service_endpoints": "http://gpu-1:8000",
    },
}

# Three servers at one moment.
SERVERS = (
    EndpointView("large", is_healthy=True, total_gpus=8, available_gpus=2),
    EndpointView("small", is_healthy=True, total_gpus=2, available_gpus=1),
    EndpointView("broken", is_healthy=False, total_gpus=4, available_gpus=0),
)


def show_patterns() -> None:
    """Build a client from each pattern. A bad value would be a ValueError here, not later."""
    for name, options in PATTERNS.items():
        client = GPUWorkerPoolClient(**options)
        config = ClientConfig.build(**options, environ={})
        print(f"\n{name}")
        for key, value in options.items():
            print(f"    {key} = {'(not shown)' if key == 'token' else repr(value)}")
        print(f"  several servers: {client.is_multi_endpoint_mode()}; the first GPU of each would be called")
        print(f"    {', '.join(f'{endpoint_id}:0' for endpoint_id in config.endpoints)}")


def show_strategies() -> None:
    """Ask the client's own balancer which server it would try first."""
    print("\nStrategies: which server is asked first, in ten requests, in this state")
    for server in SERVERS:
        state = f"{server.available_gpus} of {server.total_gpus} GPUs free" if server.is_healthy else "down"
        print(f"    {server.endpoint_id}: {state}")
    for strategy in STRATEGIES:
        balancer = Balancer(strategy)
        firsts = Counter(balancer.order(SERVERS)[0] for _ in range(10))
        print(f"  {strategy:<13}{', '.join(f'{name} {count} times' for name, count in firsts.most_common())}")


if __name__ == "__main__":
    argparse.ArgumentParser(description="Patterns of configuration for several GPU servers.").parse_args()
    print("Patterns for several GPU servers. Nothing is started and no server is called.")
    show_patterns()
    show_strategies()
