"""`gpu-pool service`: units that systemd accepts, written, shown and removed. No systemd runs the tests, so none is started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.in_process import called
from tests.other_user import ALICE, python_as

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "XDG_CONFIG_HOME": "", "PATH": "/nonexistent"}


@needs_systemd
@pytest.mark.parametrize("kind", [(), ("--user",), ("--keeper",), ("--enforce",)])
def test_systemd_accepts_the_unit(kind: tuple[str, ...], tmp_path: Path) -> None:
    unit = tmp_path / ("gpu-pool-enforce.service" if kind == ("--enforce",) else "gpu-worker-pool.service")
    unit.write_text(called("service", "install", "--print", *kind).out)
    command = [
        "systemd-analyze",
        *(["--user"] if kind and kind != ("--enforce",) else []),
        "verify",
        "--man=no",
        str(unit),
    ]
    env = {**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    checked = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert (checked.returncode, str(unit.name) in checked.stderr) == (0, False), checked.stderr


def test_a_unit_of_a_user_is_written_shown_and_removed(home: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / ".config/systemd/user/gpu-worker-pool.service"
    written = called("service", "install", "--user", env=home)
    assert (written.code, "systemd does not run here" in written.err) == (0, True), written.err
    assert f"ExecStart={sys.executable} -m gpu_worker_pool.gpu_server" in file.read_text()
    shown = called("service", "status", env=home)
    assert (shown.code, str(file) in shown.out, "differs" in shown.out) == (0, True, False)
    file.write_text(file.read_text().replace("Restart=always", "Restart=no"))
    assert "differs" in called("service", "status", env=home).out
    assert called("service", "install", "--user", env=home).code == 0
    assert "Restart=always" in file.read_text()
    assert called("service", "remove", "--user", env=home).code == 0
    assert not file.exists()


def test_the_service_of_the_machine_needs_a_python_that_its_user_can_read(home: dict[str, str], tmp_path: Path) -> None:
    unit = tmp_path / "etc/systemd/system/gpu-worker-pool.service"
    done = called("service", "install", env={**home, "DESTDIR": str(tmp_path)})
    if Path(sys.executable).is_relative_to("/home") or Path(sys.executable).is_relative_to("/root"):
        assert (done.code, "which the service cannot read" in done.err, unit.exists()) == (125, True, False)
    else:
        assert (done.code, "User=gpu-worker-pool" in unit.read_text()) == (0, True), done.err


def test_what_is_wrong_is_said_and_nothing_changes(home: dict[str, str], tmp_path: Path) -> None:
    absent = called("service", "status", env=home)
    assert (absent.code, "no service of the pool is installed" in absent.err) == (1, True)
    assert called("service", "remove", "--user", env=home).code == 1
    foreign = tmp_path / ".config/systemd/user/gpu-pool-jobs.service"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("[Service]\nExecStart=/bin/true\n")
    for word in ("install", "remove"):
        refused = called("service", word, "--keeper", env=home)
        assert (refused.code, "was not written by gpu-pool" in refused.err) == (1, True)
    assert foreign.read_text() == "[Service]\nExecStart=/bin/true\n"


def test_an_ordinary_user_is_told_of_sudo_and_user() -> None:
    command = python_as(ALICE, "-m", "gpu_worker_pool", "service", "install")
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env={"PATH": "/usr/bin"}, check=False)
    assert (done.returncode, "use sudo, or --user" in done.stderr) == (1, True), done.stderr
