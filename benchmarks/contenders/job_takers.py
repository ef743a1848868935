"""Jobs of HyperQueue and Slurm that have one GPU each, in the same two calls. The process that holds the GPU is the job's.

The command of such a job is started without a scheduler as well, to show what its start takes.
"""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from benchmarks.contenders.desk import Desk
from benchmarks.contenders.takers import WAIT_S, Handle, Settings, Taker

DESK = Path(__file__).with_name("desk.py")


class JobTaker(ABC):
    """Submits a job that reports at this client's desk when it runs, and ends when it is told to."""

    # The variable that tells a job which GPU it has.
    variable = "CUDA_VISIBLE_DEVICES"

    def __init__(self, settings: Settings) -> None:
        self._desk = Desk(f"{settings['folder']}/{os.getpid()}", WAIT_S)
        self._command = [settings["python"], "-I", "-S", str(DESK), self._desk.path, self.variable]

    @abstractmethod
    def submit(self) -> None:
        """Submit the job."""

    def take(self) -> Handle:
        self.submit()
        visitor = self._desk.wait()
        return Handle(visitor.gpus[0], visitor.at, visitor.pid, visitor)

    def release(self, handle: Handle) -> None:
        handle.what.end()


class HyperQueueTaker(JobTaker):
    """A job of one task for each use of a GPU, by the Python API."""

    variable = "HQ_CPUS"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        library = importlib.import_module("hyperqueue")
        self._make = library.Job
        self._folder = settings["folder"]
        self._client = library.Client(self._folder)

    def submit(self) -> None:
        job = self._make(default_workdir=self._folder)
        job.program(self._command, stdout=None, stderr=None)
        self._client.submit(job)


class CommandTaker(JobTaker):
    """Starts the command at once, without a scheduler."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._started: list[subprocess.Popen[bytes]] = []

    def submit(self) -> None:
        # Those that have ended are waited for.
        self._started = [command for command in self._started if command.poll() is None]
        env = {**os.environ, self.variable: "0"}
        self._started.append(subprocess.Popen(self._command, stdin=subprocess.DEVNULL, env=env))


class SrunTaker(JobTaker):
    """A `srun` for each use of a GPU. It stays while the job runs."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._sruns: list[subprocess.Popen[bytes]] = []

    def submit(self) -> None:
        # Those that have ended are waited for.
        self._sruns = [srun for srun in self._sruns if srun.poll() is None]
        self._sruns.append(_start("srun", *self._command))

    def cycle(self) -> None:
        """Run a job that does nothing to its end."""
        assert _start("srun", "true").wait(WAIT_S) == 0, "srun has failed"


class SbatchTaker(JobTaker):
    """A `sbatch` for each use of a GPU. It returns when the job is in the queue."""

    def submit(self) -> None:
        script = f"--wrap=exec {shlex.join(self._command)}"
        assert _start("sbatch", "--output=/dev/null", script).wait(WAIT_S) == 0, "sbatch has failed"


def _start(program: str, *more: str) -> subprocess.Popen[bytes]:
    command = [program, "--quiet", "--ntasks=1", "--gres=gpu:1", *more]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


TAKERS: dict[str, Callable[[Settings], Taker]] = {
    "command": CommandTaker,
    "hyperqueue": HyperQueueTaker,
    "slurm-srun": SrunTaker,
    "slurm-sbatch": SbatchTaker,
}
