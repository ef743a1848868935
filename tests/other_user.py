"""Programs of the package as other Unix users: for tests of what one user can do to another."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import pytest

import gpu_worker_pool

# No user of these numbers needs to exist.
ALICE, BOB = 61_001, 61_002
_PACKAGE = Path(gpu_worker_pool.__file__).parent.parent
_SYSTEM_PYTHON = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"


def python_as(uid: int, *arguments: str) -> list[str]:
    """The command that runs Python with this package as another user; the test is skipped where that cannot be."""
    command = command_as(uid, *arguments)
    if isinstance(command, str):
        pytest.skip(command)
    return command


def command_as(uid: int, *arguments: str) -> list[str] | str:
    """The same, or why that cannot be."""
    if os.geteuid() != 0:
        return "only root may start programs as other users"
    python = next((python for python in (sys.executable, _SYSTEM_PYTHON) if _works(python)), None)
    if python is None:
        return f"other users can run neither {sys.executable} nor {_SYSTEM_PYTHON} with this package"
    return [*_as_user(uid, python), *arguments]


def folder_of(uid: int, folder: Path) -> Path:
    """Make the folder, and give it to the user, who can reach it."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chown(folder, uid, uid)
    folder.chmod(0o700)
    for parent in folder.parents:
        if parent == Path("/") or parent.owner() != Path.home().owner():
            break
        parent.chmod(parent.stat().st_mode | 0o011)
    return folder


def _as_user(uid: int, python: str) -> list[str]:
    paths = [str(_PACKAGE), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return [
        "/usr/bin/setpriv",
        f"--reuid={uid}",
        f"--regid={uid}",
        "--clear-groups",
        "/usr/bin/env",
        f"PYTHONPATH={os.pathsep.join(dict.fromkeys(paths))}",
        python,
    ]


@cache
def _works(python: str) -> bool:
    try:
        tried = subprocess.run(
            [*_as_user(ALICE, python), "-c", "import gpu_worker_pool.server.app"],
            check=False,
            capture_output=True,
            cwd="/",
        )
    except OSError:
        return False
    return tried.returncode == 0
