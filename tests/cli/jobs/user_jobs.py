"""The jobs of a user in a folder of their own, for tests; what they started is ended with them."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from gpu_worker_pool.cli.jobs.job_view import Job, find_jobs
from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.host.processes import Machine
from gpu_worker_pool.jobs.job_spec import parse_key
from gpu_worker_pool.jobs.job_store import JobStore
from gpu_worker_pool.jobs.submission import JobState
from gpu_worker_pool.testing import ServerProcess
from tests.cli.own_process import Done, gpu_pool
from tests.processes import has_ended
from tests.server.leasing import eventually

# A keeper loads for a while on a busy machine.
SOON_S = 60.0


class UserJobs:
    """`gpu-pool` for one folder of jobs. The context manager kills the keeper and all that runs at the end."""

    def __init__(self, folder: Path, server: ServerProcess | None, env: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.server = server
        self.store = JobStore(folder / "jobs")
        self.env = {"GPU_POOL_JOBS_DIR": str(self.store.root), **(env or {})}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_keeper()
        for record in self.store.load().values():
            for run in record.submission.open_runs.values():
                # Another process may have the pid of one that is gone.
                for process in (ProcessId(run.guard_pid, run.guard_started), ProcessId(run.pid, run.started)):
                    if Machine.here().is_alive(process):
                        with suppress(ProcessLookupError):
                            os.kill(process.pid, signal.SIGKILL)
        self.kill_keeper()
        # A supervisor that has written nothing yet, and its guard, are known by the name of their ticket.
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if str(self.store.root).encode() in path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)
        # A keeper that one of them has just started finds nothing to do, and ends.
        shutil.rmtree(self.store.root, ignore_errors=True)

    def call(self, *arguments: str, code: int = 0, env: Mapping[str, str] | None = None) -> Done:
        """Run a command, which must end with this code."""
        done = gpu_pool(*arguments, server=self.server, env={**self.env, **(env or {})}, cwd=self.folder)
        assert done.code == code, done
        return done

    def submit(self, *arguments: str, env: Mapping[str, str] | None = None) -> str:
        """Submit a job; its id."""
        return self.call("submit", *arguments, env=env).out.strip()

    def script(self, text: str, *options: str) -> str:
        """Submit a line for the shell; its id."""
        return self.submit(*options, "--", "sh", "-c", text)

    def job(self, id_: str) -> Job:
        number = parse_key(id_).number
        (found,) = find_jobs(self.store.load([number]), [id_])
        return found

    def state(self, id_: str) -> JobState:
        return self.job(id_).task.state

    def until(self, id_: str, *states: JobState) -> Job:
        """The job once it is in one of these states; without any, once it is over."""
        eventually(
            lambda: self.state(id_) in states if states else self.state(id_).is_over,
            f"job {id_} is {' or '.join(states) or 'over'}: {self.job(id_).task} {self.keeper_log()}",
            within_s=SOON_S,
        )
        return self.job(id_)

    def output(self, id_: str) -> str:
        """What the last attempt has written; nothing yet where it is about to start."""
        try:
            return self.log(id_).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def log(self, id_: str, attempt: int | None = None) -> Path:
        job = self.job(id_)
        return job.record.log_of(job.key.index, attempt or job.task.attempts)

    # --- the keeper ----------------------------------------------------------------------------------------------------

    def keeper_log(self) -> str:
        try:
            return (self.store.root / "keeper.log").read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def keeper_facts(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.store.root / "keeper.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return found

    def kill_keeper(self) -> None:
        """Kill it with -9, if there is one."""
        pid = self.keeper_facts().get("pid")
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            assert has_ended(pid)

    def lines(self, name: str) -> list[str]:
        """The lines of a file that jobs write to."""
        try:
            return (self.folder / name).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []


def twice(lines: Sequence[str]) -> list[str]:
    """Those that are there more than once."""
    return sorted({line for line in lines if lines.count(line) > 1})
