"""The site builds strictly, and its reference has everything that the code has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gpu_worker_pool
from gpu_worker_pool.cli.app import paths
from gpu_worker_pool.server.settings import ServerSettings

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(ROOT / "scripts/site.py"), "--out", str(out)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return out


def test_every_command_setting_and_name_has_its_entry(site: Path) -> None:
    commands, settings, python = (
        (site / f"reference/{page}/index.html").read_text() for page in ("commands", "settings", "python")
    )
    assert [path for path in paths() if f'id="{"-".join(filter(None, path))}"' not in commands] == []
    assert [name for name in ServerSettings.model_fields if name.upper() not in settings] == []
    assert [name for name in gpu_worker_pool.__all__ if f'id="{name.lower()}"' not in python] == []


def test_every_document_is_a_page(site: Path) -> None:
    docs = ROOT / "docs"
    pages = [page.relative_to(docs).with_suffix("") for page in docs.rglob("*.md") if page.name != "index.md"]
    assert [page for page in pages if not (site / page / "index.html").exists()] == []
    front = (site / "index.html").read_text()
    assert [page for page in pages if f'href="{page}/"' not in front] == []
