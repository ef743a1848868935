"""An `nvidia-smi` that prints, hangs and fails as it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpus.fake_nvidia_smi import FakeNvidiaSmi, install


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvidiaSmi:
    fake = install(tmp_path)
    for name, value in fake.environment().items():
        monkeypatch.setenv(name, value)
    return fake
