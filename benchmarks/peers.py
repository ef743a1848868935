"""The contenders that come from PyPI, in a virtual environment of their own, and the programs of others.

    python -m benchmarks.peers      # makes .bench-venv from peers.txt

Nothing is installed outside of that folder. Slurm and `ts` are Debian's packages slurm-wlm and task-spooler.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.figures import ROOT

FOLDER = ROOT / ".bench-venv"
PYTHON = FOLDER / "bin" / "python"
WANTED = Path(__file__).with_name("peers.txt")
# Debian's daemons are not on the PATH of an ordinary user.
PLACES = "/usr/local/sbin:/usr/sbin:/sbin"
DEBIAN = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "munged": "slurm-wlm",
    "srun": "slurm-wlm",
    "tsp": "task-spooler",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}


class MissingError(Exception):
    """A contender cannot be measured here; the text says why, and what to do about it."""


def python_with(module: str) -> Path:
    """Return the interpreter of .bench-venv, which must have this module."""
    if not list(FOLDER.glob(f"lib/python*/site-packages/{module}")):
        raise MissingError(f"{module} is not in .bench-venv: python -m benchmarks.peers installs it")
    return PYTHON


def program(name: str) -> str:
    """Return the path of a program that is installed."""
    found = shutil.which(name) or shutil.which(name, path=PLACES)
    if found is None:
        raise MissingError(f"{name} is not installed: on Debian, apt-get install {DEBIAN.get(name, name)}")
    return found


def make() -> None:
    """Make the environment."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(FOLDER)], check=True)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--requirement", str(WANTED)], check=True)


if __name__ == "__main__":
    make()
