"""The example file must say what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest
from dotenv import dotenv_values

from gpu_worker_pool.server.settings import ServerSettings

from .running import ROOT

NOT_THE_SERVERS = {"GPU_POLLING_INTERVAL"}


def test_the_example_shows_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = dotenv_values(ROOT / ".env.example")
    monkeypatch.chdir(tmp_path)
    defaults = ServerSettings()
    for name, value in shown.items():
        if name not in NOT_THE_SERVERS:
            default = getattr(defaults, name.lower())
            assert value is not None
            assert (float(value) == default) if type(default) is float else (value == _as_text(default)), name


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
