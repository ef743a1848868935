"""The project's own rules: they must bite, or they are decoration."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.conftest import LONGEST

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


def test_each_import_that_a_rule_forbids_is_found(copy_of_the_package: Path) -> None:
    """All in one look, because each of them takes as long."""
    package = copy_of_the_package / "gpu_worker_pool"
    frameworks = ("pydantic", "fastapi", "starlette")
    forbidden = {
        "core/decider/step.py": "import gpu_worker_pool.server\nimport time\nimport asyncio\nfrom random import random\nimport os.path",
        "jobs/submission.py": "import time",
        "server/authority/presence.py": "import gpu_worker_pool.server.http.response",
        "server/agent/handshake.py": "import gpu_worker_pool.server.authority.pool",
        "server/leader/fleet_leader.py": "import gpu_worker_pool.server.authority.pool",
        "server/metrics.py": "import gpu_worker_pool.server.routes.statistics",
        "wire/reader.py": "\n".join(f"import {framework}" for framework in frameworks),
    }
    for name, lines in forbidden.items():
        module = package / name
        module.write_text(f"{lines}\n{module.read_text(encoding='utf-8')}", encoding="utf-8")

    result = lint_imports(copy_of_the_package)

    assert result.returncode != 0
    inward, inside, core, beside, wire = (
        " ".join(result.stdout.rpartition(rule)[2].split())
        for rule in (
            "Imports point inward",
            "Inside the server",
            "The core is pure",
            "Decisions outside the core",
            "The protocol is light",
        )
    )
    assert "core.decider.step -> gpu_worker_pool.server" in inward
    assert [each for each in ("time", "asyncio", "random", "os") if f"core.decider.step -> {each} (" not in core] == []
    for one, other in (
        ("authority.presence", "http.response"),
        ("agent.handshake", "authority.pool"),
        ("leader.fleet_leader", "authority.pool"),
        ("metrics", "routes.statistics"),
    ):
        assert f"server.{one} -> gpu_worker_pool.server.{other}" in inside
    assert "jobs.submission -> time (" in beside
    assert [each for each in frameworks if f"wire.reader -> {each} (" not in wire] == []


@pytest.mark.parametrize("call", ["print('x')", "open('x')"])
def test_a_core_that_talks_to_the_world_by_a_builtin_is_found(copy_of_the_package: Path, call: str) -> None:
    module = copy_of_the_package / "gpu_worker_pool" / "core" / "decider" / "step.py"
    module.write_text(f"{module.read_text(encoding='utf-8')}\n\n{call}\n", encoding="utf-8")

    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "gpu_worker_pool/core"]
    result = subprocess.run(command, cwd=copy_of_the_package, capture_output=True, text=True, check=False)

    assert result.returncode != 0
    assert "step.py" in result.stdout


def test_the_client_loads_nothing_heavy() -> None:
    """tests/server/test_starting.py has the same for the server."""
    heavy = {"fastapi", "uvicorn", "pynvml", "pydantic"}
    program = (
        f"import sys, gpu_worker_pool; loaded = {heavy} & set(sys.modules); sys.exit(str(loaded) if loaded else 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stderr


def test_the_constraints_hold_names_and_versions_and_nothing_else() -> None:
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name, version = line.split("==")
        assert name.replace("-", "").replace("_", "").isalnum()
        assert version.replace(".", "").replace("post", "").isalnum()


def test_no_class_name_stands_for_two_things() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module in sorted((ROOT / "gpu_worker_pool").rglob("*.py")):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(str(module.relative_to(ROOT)))

    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_the_files_that_begin_first_are_there() -> None:
    assert [name for name in LONGEST if not (ROOT / name).exists()] == []
