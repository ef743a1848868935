"""The project's own rules: they must bite, or they are decoration."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def copy_of_the_package(tmp_path: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "gpu_worker_pool", tmp_path / "gpu_worker_pool", ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    program = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_import_rules_are_kept(copy_of_the_package: Path) -> None:
    result = lint_imports(copy_of_the_package)

    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("line", ["import time", "import asyncio", "from random import random", "import os.path"])
def test_a_core_that_is_not_pure_is_found(copy_of_the_package: Path, line: str) -> None:
    module = copy_of_the_package / "gpu_worker_pool" / "core" / "decider" / "step.py"
    module.write_text(f"{line}  # noqa\n{module.read_text(encoding='utf-8')}", encoding="utf-8")

    result = lint_imports(copy_of_the_package)

    assert result.returncode != 0
    assert "The core is pure" in result.stdout


def test_an_import_that_points_outward_is_found(copy_of_the_package: Path) -> None:
    outer = copy_of_the_package / "gpu_worker_pool" / "server"
    outer.mkdir(exist_ok=True)
    (outer / "__init__.py").touch()
    module = copy_of_the_package / "gpu_worker_pool" / "core" / "decider" / "step.py"
    module.write_text(f"import gpu_worker_pool.server\n{module.read_text(encoding='utf-8')}", encoding="utf-8")

    result = lint_imports(copy_of_the_package)

    assert result.returncode != 0
    assert "Imports point inward" in result.stdout


@pytest.mark.parametrize("framework", ["pydantic", "fastapi", "starlette", "rich", "typer"])
def test_a_protocol_that_needs_a_framework_is_found(copy_of_the_package: Path, framework: str) -> None:
    module = copy_of_the_package / "gpu_worker_pool" / "wire" / "reader.py"
    module.write_text(f"import {framework}  # noqa\n{module.read_text(encoding='utf-8')}", encoding="utf-8")

    result = lint_imports(copy_of_the_package)

    assert result.returncode != 0
    assert "The protocol is light" in result.stdout


@pytest.mark.parametrize("call", ["print('x')", "open('x')"])
def test_a_core_that_talks_to_the_world_by_a_builtin_is_found(copy_of_the_package: Path, call: str) -> None:
    module = copy_of_the_package / "gpu_worker_pool" / "core" / "decider" / "step.py"
    module.write_text(f"{module.read_text(encoding='utf-8')}\n\n{call}\n", encoding="utf-8")

    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "gpu_worker_pool/core"]
    result = subprocess.run(command, cwd=copy_of_the_package, capture_output=True, text=True, check=False)

    assert result.returncode != 0
    assert "step.py" in result.stdout


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("gpu_worker_pool", {"fastapi", "uvicorn", "pynvml", "pydantic", "typer", "rich"}),
        # Only a server of a fleet needs these two.
        ("gpu_worker_pool.gpu_server", {"aiohttp", "asyncpg", "fastapi", "pynvml", "typer", "rich"}),
    ],
    ids=["the client", "the server of one box"],
)
def test_what_is_heavy_is_loaded_only_where_it_is_needed(module: str, heavy: set[str]) -> None:
    program = f"import sys, {module}; loaded = {heavy} & set(sys.modules); sys.exit(str(loaded) if loaded else 0)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stderr


def test_the_light_client_depends_on_nothing() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert project["dependencies"] == []


def test_the_constraints_hold_names_and_versions_and_nothing_else() -> None:
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name, version = line.split("==")
        assert name.replace("-", "").replace("_", "").isalnum()
        assert version.replace(".", "").replace("post", "").isalnum()


@pytest.mark.parametrize(("target", "command"), [("demo", "demo"), ("demo-fleet", "demo --fleet")])
def test_make_demo_is_gpu_pool_demo(target: str, command: str) -> None:
    result = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S607

    assert f".venv/bin/python -m gpu_worker_pool {command}" in result.stdout.splitlines()
