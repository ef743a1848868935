"""Slurm on one machine: its controller, its node daemon and munge, with generic resources that stand for GPUs, and `srun`."""

from __future__ import annotations

import os
import secrets
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks import peers
from benchmarks.contenders.contender import Command, Held, Serving, Settings, finished
from benchmarks.contenders.desk import Desk
from benchmarks.contenders.namespaces import running_apart
from benchmarks.processes import environment, running, wait_until

# Slurm does not count a GPU without a device file. These behave like /dev/null.
DEVICE = os.makedev(1, 3)
ASK_S = 5.0
SRUN = ("srun", "--quiet", "--ntasks=1", "--gres=gpu:1")
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


class SrunTaker:
    """A `srun` for each use of a GPU. It stays while the job runs."""

    def __init__(self, settings: Settings) -> None:
        self._desk = Desk(f"{settings['folder']}/{os.getpid()}")
        self._started: list[subprocess.Popen[bytes]] = []

    def take(self) -> Held:
        # Those that have ended are waited for.
        self._started = [each for each in self._started if each.poll() is None]
        self._started.append(subprocess.Popen([*SRUN, *self._desk.command], stdin=subprocess.DEVNULL))
        return Held(*self._desk.wait())

    def release(self, held: Held) -> None:
        held.what.close()

    def cycle(self) -> None:
        self.release(self.take())


class SrunQueue:
    """A waiting `srun` for each command."""

    def __init__(self, joined: Sequence[str], env: dict[str, str]) -> None:
        self._joined = joined
        self._env = environment(env)

    def run_one(self, command: Command) -> None:
        finished([self._start(command)])

    def run_all(self, commands: Sequence[Command]) -> None:
        self.line_up(commands)()

    def line_up(self, commands: Sequence[Command]) -> Callable[[], None]:
        started: list[subprocess.Popen[bytes]] = []
        for number, command in enumerate(commands):
            started.append(self._start(command))
            states = ["PENDING"] * number + ["RUNNING"]
            wait_until(lambda states=states: self._states() == states, f"{number} commands wait")  # type: ignore[misc]
        return lambda: finished(started)

    def _start(self, command: Command) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*self._joined, *SRUN, *command], env=self._env, stdin=subprocess.DEVNULL)

    def _states(self) -> list[str]:
        return sorted(self.ask("squeue", "--noheader", "--format=%T").split())

    def ask(self, *command: str) -> str:
        """Return what a command of Slurm prints; nothing if it takes too long."""
        try:
            done = subprocess.run(
                [*self._joined, *command], capture_output=True, text=True, check=False, timeout=ASK_S, env=self._env
            )
        except subprocess.TimeoutExpired:
            return ""
        return done.stdout.strip()


@contextmanager
def serve(folder: Path, gpus: int) -> Iterator[Serving]:
    """Run its daemons in a network namespace of their own."""
    munged, slurmctld, slurmd = map(peers.program, ("munged", "slurmctld", "slurmd"))
    # The path of a socket must not be longer than 107 characters.
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True) as name:
        _configure(Path(name), gpus)
        env = {"SLURM_CONF": f"{name}/slurm.conf"}
        command = [munged, "--foreground", "--force", *_munge_files(name)]
        with running_apart(command, folder / "munged.log", as_root=True) as joined:
            wait_until(Path(f"{name}/munge.socket").exists, "munged is ready")
            with (
                running([*joined, slurmctld, "-D"], folder / "slurmctld.log", env),
                running([*joined, slurmd, "-D"], folder / "slurmd.log", env),
            ):
                queue = SrunQueue(joined, env)
                wait_until(lambda: queue.ask("sinfo", "--noheader", "--format=%T") == "idle", "Slurm is ready")
                yield Serving({"folder": name}, [*joined, *Serving({}).python], env, queue)


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
    key.write_bytes(secrets.token_bytes(128))


def _munge_files(folder: str) -> list[str]:
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    return [f"--{option}={folder}/munge.{ending}" for option, ending in files.items()]


TAKERS = {"": SrunTaker}
