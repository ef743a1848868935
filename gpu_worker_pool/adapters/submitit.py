"""submitit: an executor whose jobs are those of `gpu-pool submit`.

import submitit
executor = submitit.AutoExecutor("logs", cluster="gpupool")
executor.update_parameters(gpus_per_node=1, timeout_min=60)
print(executor.submit(train, 0.1).result())
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from submitit.core import core, job_environment, submission, utils

from gpu_worker_pool.failure import REFUSED

_NAME: Final = "gpupool"
_COMMAND: Final = (sys.executable, "-m", "gpu_worker_pool")
_JOB_ID: Final = "GPU_POOL_JOB_ID"
# What submitit calls the states of a job. All others are over.
_STATES: Final = {"submitted": "PENDING", "waiting": "PENDING", "running": "RUNNING", "ended": "COMPLETED"}
_REMOVED: Final = "REMOVED"
_ResultT_co = TypeVar("_ResultT_co", covariant=True)


class GpuPoolWatcher(core.InfoWatcher):
    """Asks for the states of all jobs at once."""

    def update(self) -> None:
        """Ask for those that are not over. Where one of them was removed since, each is asked for alone."""
        ids = sorted(self._registered - self._finished)
        if ids and not self._ask(ids):
            for job_id in ids:
                if not self._ask([job_id]):
                    self._info_dict[job_id] = {"state": _REMOVED}
        self._last_status_check = time.time()
        self._finished |= {job_id for job_id in ids if self.is_done(job_id, mode="cache")}

    def _ask(self, ids: Sequence[str]) -> bool:
        """Take in what is known of these jobs; False where there is no job of one of these ids."""
        self._num_calls += 1
        done = subprocess.run([*_COMMAND, "jobs", "--json", *ids], capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode == 0:
            for job in json.loads(done.stdout)["jobs"]:
                state = _STATES.get(job["state"], job["state"].upper())
                self._info_dict[job["id"]] = {**job, "state": state}
        return done.returncode != REFUSED

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Its state in the words of submitit."""
        return self.get_info(job_id, mode=mode).get("state", "UNKNOWN")


class GpuPoolJob(core.Job[_ResultT_co]):
    """A submitted job; `gpu-pool jobs`, `explain` and `cancel` know it by its `job_id`."""

    watcher = GpuPoolWatcher(delay_s=5)

    def cancel(self, check: bool = True) -> None:  # noqa: FBT001, FBT002 - submitit's signature
        """Stop it, or take it out of the queue."""
        subprocess.run([*_COMMAND, "cancel", self.job_id], check=check, capture_output=True)  # noqa: S603


class GpuPoolJobEnvironment(job_environment.JobEnvironment):
    """What submitit asks about the job in which it runs."""

    _env = {  # noqa: RUF012 - submitit's attribute
        "job_id": _JOB_ID,
        "num_tasks": "SUBMITIT_GPUPOOL_NTASKS",
        "num_nodes": "SUBMITIT_GPUPOOL_NNODES",
        "node": "SUBMITIT_GPUPOOL_NODE",
        "global_rank": "SUBMITIT_GPUPOOL_RANK",
        "local_rank": "SUBMITIT_GPUPOOL_RANK",
    }

    def _handle_signals(self, paths: utils.JobPaths, delayed: utils.DelayedSubmission) -> None:
        """The pool warns by SIGTERM: the job writes its checkpoint, and the pool runs it again where it was preempted."""
        super()._handle_signals(paths, delayed)
        handler = job_environment.SignalHandler(self, paths, delayed)
        signal.signal(signal.SIGTERM, handler.checkpoint_and_try_requeue)


class GpuPoolExecutor(core.PicklingExecutor):
    """Submits functions as jobs of the pool, one process each. `options` are words for `gpu-pool submit`: ["--memory", "8GB"]."""

    job_class = GpuPoolJob

    @classmethod
    def name(cls) -> str:
        """What `AutoExecutor` calls it."""
        return _NAME

    @classmethod
    def affinity(cls) -> int:
        """It is there for those who ask for it."""
        return 0

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return {"options", "array_parallelism"}

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        for name in ("nodes", "tasks_per_node"):
            if kwargs.get(name, 1) != 1:
                raise ValueError(f"{name} is {kwargs[name]}; it must be 1: a job of the pool is one process on one box")
        if kwargs.get("gpus_per_node", 1) < 1:
            raise ValueError("gpus_per_node must be at least 1: the pool hands out GPUs")
        super()._internal_update_parameters(**kwargs)

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[core.Job[Any]]:
        """Submit them all at once, as an array where there are several."""
        folder = utils.JobPaths.get_first_id_independent_folder(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        pickles = []
        for delayed in delayed_submissions:
            pickles.append(folder / f"{uuid.uuid4().hex}.pkl")
            delayed.set_timeout(self.parameters.get("timeout_min", 0) or sys.maxsize, self.max_num_timeout)
            delayed.dump(pickles[-1])
        jobs: list[core.Job[Any]] = [self.job_class(self.folder, job_id) for job_id in self._submit(len(pickles))]
        for job, pickle in zip(jobs, pickles, strict=True):
            job.paths.move_temporary_file(pickle, "submitted_pickle")
        return jobs

    def _submit(self, number: int) -> list[str]:
        asked = self.parameters
        words = ["--gpus", str(asked.get("gpus_per_node", 1))]
        if minutes := asked.get("timeout_min"):
            words += ["--time", f"{minutes * 60:g}s"]
        if "name" in asked:
            words += ["--name", asked["name"]]
        if number > 1:
            at_once = f"%{asked['array_parallelism']}" if "array_parallelism" in asked else ""
            words += ["--array", f"0-{number - 1}{at_once}"]
        run = [sys.executable, "-u", "-m", __name__, str(self.folder), str(int(asked.get("stderr_to_stdout", False)))]
        command = [*_COMMAND, "submit", "--json", *words, *asked.get("options", ()), "--", *run]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own command
        if done.returncode:
            raise RuntimeError(f"nothing was submitted: {done.stderr.strip()}")
        ids: list[str] = json.loads(done.stdout)["jobs"]
        return ids

    # What submitit asks of executors with files of shell commands.

    def _num_tasks(self) -> int:
        return 1

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        raise NotImplementedError

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        raise NotImplementedError

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        raise NotImplementedError


def main(arguments: Sequence[str]) -> None:
    """Run the job whose number the environment has; its output goes where submitit looks for it."""
    folder, with_errors = arguments
    os.environ["SUBMITIT_EXECUTOR"] = _NAME
    paths = utils.JobPaths(folder, job_id=os.environ[_JOB_ID], task_id=0)
    paths.folder.mkdir(parents=True, exist_ok=True)
    print(f"submitit writes its output to {paths.stdout}", flush=True)  # noqa: T201 - for `gpu-pool logs`
    for path, descriptor in ((paths.stdout, 1), (paths.stdout if with_errors == "1" else paths.stderr, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, descriptor)
        os.close(file)
    submission.process_job(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
