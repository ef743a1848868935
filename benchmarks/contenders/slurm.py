"""Slurm on one machine: its controller, its node daemon and munge, with generic resources that stand for GPUs."""

from __future__ import annotations

import os
import secrets
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks import peers
from benchmarks.contenders import namespaces
from benchmarks.contenders.processes import Daemon, running, wait_until
from benchmarks.contenders.servers import Serving

# Slurm does not count a GPU without a device file. These behave like /dev/null.
DEVICE = os.makedev(1, 3)
KEY_BYTES = 128
ASK_S = 5.0
LEADS = "Running as primary controller"

# Its defaults, except for what one machine without cgroups and with more GPUs than processors needs.
CONFIGURATION = """\
ClusterName=bench
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs={gpus} Gres=gpu:{gpus}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def serve(folder: Path, gpus: int) -> Iterator[Serving]:
    """Run its daemons in a network namespace of their own."""
    programs = {name: peers.program(name) for name in peers.SLURM}
    folder.mkdir()
    # The path of a socket must not be longer than 107 characters.
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True) as name,
        ExitStack() as ends,
    ):
        _configure(Path(name), gpus)
        env = {"SLURM_CONF": f"{name}/slurm.conf"}
        munged = [str(programs["munged"]), "--foreground", "--force", *_munge_files(name)]
        log = folder / "slurmctld.log"
        began = time.monotonic()
        munge, joined = ends.enter_context(namespaces.running_alone(munged, folder / "munged.log", as_root=True))
        wait_until(lambda: Path(f"{name}/munge.socket").exists(), folder / "munged.log")
        command = [*joined, str(programs["slurmctld"]), "-D"]
        controller = ends.enter_context(Daemon(command, log, lambda: LEADS in log.read_text(encoding="utf-8"), env))
        node = ends.enter_context(running([*joined, programs["slurmd"], "-D"], folder / "slurmd.log", env))
        wait_until(lambda: _ask(joined, env, "sinfo", "--noheader", "--format=%T") == "idle", log)
        settings = {"folder": name, "python": sys.executable}
        pids = [munge, controller.pid, node]
        python = [*joined, sys.executable]

        def clear() -> None:
            _ask(joined, env, "scancel", "--me")
            wait_until(lambda: _ask(joined, env, "squeue", "--noheader") == "", log)

        yield Serving(settings, time.monotonic() - began, pids, python, env, controller.restart, clear)


def _configure(folder: Path, gpus: int) -> None:
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host = socket.gethostname().partition(".")[0]
    text = CONFIGURATION.format(host=host, folder=folder, gpus=gpus)
    (folder / "slurm.conf").write_text(text, encoding="utf-8")
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{gpus - 1}]\n", encoding="utf-8")
    try:
        for gpu in range(gpus):
            os.mknod(folder / f"gpu{gpu}", stat.S_IFCHR | 0o666, DEVICE)
    except PermissionError:
        raise peers.MissingError("it needs a device file for each GPU, and none can be made here") from None
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(KEY_BYTES))


def _munge_files(folder: str) -> list[str]:
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    return [f"--{option}={folder}/munge.{ending}" for option, ending in files.items()]


def _ask(joined: Sequence[str], env: Mapping[str, str], *command: str) -> str | None:
    """Return what a command of Slurm prints, or None if it takes too long."""
    whole = {**os.environ, **env}
    try:
        done = subprocess.run(
            [*joined, *command], capture_output=True, text=True, check=False, timeout=ASK_S, env=whole
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip()
