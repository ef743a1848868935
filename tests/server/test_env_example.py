"""The example file must say what the code does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from dotenv import dotenv_values

from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.server.settings import ServerSettings
from tests.server.running import ROOT

# What only the client reads, with what it calls it.
CLIENTS = {
    "GPU_POLLING_INTERVAL": "polling_interval",
    "GPU_LOAD_BALANCING_STRATEGY": "strategy",
    "GPU_ENDPOINT_TIMEOUT": "endpoint_timeout",
    "GPU_ENDPOINT_MAX_RETRIES": "endpoint_max_retries",
    "GPU_ENDPOINT_HEALTH_CHECK_INTERVAL": "endpoint_health_check_interval",
    "GPU_POOL_TTL": "ttl_s",
}


def test_the_example_shows_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = dotenv_values(ROOT / ".env.example")
    monkeypatch.chdir(tmp_path)
    server, client = ServerSettings(), ClientConfig.build(environ={})
    assert shown.keys() > CLIENTS.keys()
    for name, value in shown.items():
        default = getattr(client, CLIENTS[name]) if name in CLIENTS else getattr(server, name.lower())
        assert value is not None
        assert (float(value) == default) if type(default) in {int, float} else (value == _as_text(default)), name


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_it_can_be_sourced_by_a_shell() -> None:
    shown = {name: value or "" for name, value in dotenv_values(ROOT / ".env.example").items()}
    script = f'set -eu; set -a; . "{ROOT}/.env.example"; env -0'
    done = subprocess.run(["/bin/sh", "-c", script], env={}, capture_output=True, text=True, check=True)
    sourced = dict(line.split("=", 1) for line in done.stdout.split("\0") if line)
    assert {name: sourced.get(name) for name in shown} == shown
