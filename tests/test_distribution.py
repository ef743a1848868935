"""What is published: the wheel and the source archive, installed as a stranger does, without this folder."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import gpu_worker_pool
from gpu_worker_pool.testing import ServerProcess

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make dist` builds it: first the source archive, then the wheel out of that."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


def new_environment(folder: Path, *, with_packages: bool) -> Path:
    """A virtual environment without this package: empty, or with the packages that the tests have."""
    venv.create(folder, with_pip=False, symlinks=True)
    if with_packages:
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


def pip(environment: Path, *arguments: str) -> None:
    """Without an index, so what is missing cannot come from elsewhere."""
    command = [sys.executable, "-m", "pip", "--python", str(environment / "python"), "--disable-pip-version-check"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_has_all_that_is_needed_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = Parser().parsestr(next(archive.read(n).decode() for n in names if n.endswith("dist-info/METADATA")))
        entry_points = next(archive.read(n).decode() for n in names if n.endswith("dist-info/entry_points.txt"))
    tops = {name.split("/")[0] for name in names}
    assert tops == {"gpu_worker_pool", f"gpu_worker_pool-{gpu_worker_pool.__version__}.dist-info"}
    files = [
        path for path in (ROOT / "gpu_worker_pool").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    assert {str(path.relative_to(ROOT)) for path in files} <= names
    assert "gpu_worker_pool/py.typed" in names
    assert metadata["Version"] == gpu_worker_pool.__version__
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert needed == []
    assert "[pytest11]\ngpu_worker_pool = gpu_worker_pool.pytest_plugin" in entry_points
    assert [name for name in metadata.get_all("License-File", []) if "/vendor/" in name] != [], "what is not ours"
    pythons = {line.rpartition(" ")[2] for line in metadata.get_all("Classifier", []) if "Python :: 3." in line}
    assert pythons == {"3.11", "3.12", "3.13", "3.14"}


def test_the_source_archive_has_what_its_tests_need(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert {
        "Makefile",
        "constraints.txt",
        "tests/test_distribution.py",
        "docs/index.md",
        "CHANGELOG.md",
        "LICENSE",
    } <= names


def test_the_client_alone_needs_nothing(wheel: Path, tmp_path: Path) -> None:
    environment = new_environment(tmp_path / "venv", with_packages=False)
    pip(environment, "install", "--no-index", str(wheel))
    script = (
        "import gpu_worker_pool, sys; print(gpu_worker_pool.GPUWorkerPoolClient.__module__, gpu_worker_pool.__file__)"
    )
    shown = subprocess.run(
        [environment / "python", "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert str(tmp_path) in shown.stdout
    version = subprocess.run([environment / "gpu-pool", "--version"], capture_output=True, text=True, check=True)
    assert version.stdout == f"gpu-pool {gpu_worker_pool.__version__}\n"
    pip(environment, "uninstall", "--yes", "gpu-worker-pool")
    assert not list((tmp_path / "venv").rglob("gpu?worker?pool*"))
    assert not (environment / "gpu-pool").exists()


def test_all_serves_runs_and_shows_the_page(wheel: Path, tmp_path: Path) -> None:
    environment = new_environment(tmp_path / "venv", with_packages=True)
    pip(environment, "install", "--no-index", "--ignore-installed", "--no-deps", str(wheel))
    pip(environment, "install", "--no-index", f"{wheel}[all]")
    with ServerProcess(command=[str(environment / "gpu-pool"), "serve", "--simulated-gpus", "4"]) as server:
        env = {"PATH": os.defpath, "HOME": str(tmp_path), "GPU_SERVICE_ENDPOINT": server.url}
        command = [str(environment / "gpu-pool"), "run", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
        ran = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stdout.strip() in set("0123")) == (0, True), ran.stderr
        assert b"<!doctype html>" in server.ask("/ui").body.lower()
        assert str(tmp_path) in Path(f"/proc/{server.pid}/cmdline").read_text()
