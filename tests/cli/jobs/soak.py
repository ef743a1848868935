"""Many submitted jobs, with shells, keepers and the server killed on the way: `python -m tests.cli.jobs.soak`.

JOBS (200), GPUS (1), SOAK_SEED. They wait until all are submitted. Each must run once, in the order of their submission, and
leave a whole log. Jobs that are granted GPUs at the same time may begin in any order.
"""

from __future__ import annotations

import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from gpu_worker_pool.host.guard import descendants
from gpu_worker_pool.testing import ServerProcess
from tests.cli.jobs.user_jobs import UserJobs, twice
from tests.cli.own_process import GPU_POOL, environment
from tests.cli.terminal import Terminal
from tests.preloaded import PreloadedPopen
from tests.server.leasing import OFTEN

LOG_LINES = 100
PER_SHELL = 3
PAUSE_S = 2.0
JOB = """
echo "start $GPU_POOL_JOB_ID" >> ran
while [ ! -e go ]; do sleep 0.05; done
i=0; while [ $i -lt {lines} ]; do i=$((i + 1)); echo "job $GPU_POOL_JOB_ID line $i"; done
echo "end $GPU_POOL_JOB_ID" >> ran
"""


def submit_all(user: UserJobs, number: int) -> None:
    """From shells in terminals, some jobs from each. Each shell is killed, and its terminal closed."""
    (user.folder / "job.sh").write_text(JOB.format(lines=LOG_LINES), encoding="utf-8")
    command = shlex.join([*GPU_POOL, "submit", "--", "sh", "job.sh"])
    for first in range(0, number, PER_SHELL):
        script = f"for i in $(seq {min(PER_SHELL, number - first)}); do {command} || exit 1; done; echo all sub''mitted; sleep 600"
        env = environment(user.server, user.env)
        with Terminal(["sh", "-c", script], env, cwd=user.folder) as terminal:
            terminal.wait_for("all submitted")  # leaving the block kills the shell and closes its terminal


def count_left(user: UserJobs) -> int:
    return sum(not record.submission.is_over for record in user.store.load().values())


def memory_mb(user: UserJobs) -> float:
    """The memory of the keeper and of what it started, each shared page counted in parts."""
    pid = user.keeper_facts().get("pid", os.getpid())
    found = 0.0
    for one in (pid, *descendants(pid)):
        with suppress(OSError):
            rollup = Path(f"/proc/{one}/smaps_rollup").read_text(encoding="ascii")
            found += int(rollup.partition("Pss:")[2].split()[0]) / 1024
    return found


def check(user: UserJobs, number: int, gpus: int) -> list[str]:
    """What is wrong."""
    ran = user.lines("ran")
    faults = [f"{line!r} twice" for line in twice(ran)]
    starts = [line.split()[1] for line in ran if line.startswith("start")]
    ids = [str(id_) for id_ in range(1, number + 1)]
    if sorted(starts, key=int) != ids or any(abs(int(id_) - place) >= gpus for place, id_ in enumerate(starts, 1)):
        faults.append(f"started in the order {starts}")
    for id_ in ids:
        record = user.job(id_)
        if record.task.state != "ended" or record.task.attempts != 1:
            faults.append(f"job {id_}: {record.task}")
        elif user.output(id_) != "".join(f"job {id_} line {line}\n" for line in range(1, LOG_LINES + 1)):
            faults.append(f"the log of job {id_} is not whole")
    return faults


def run(
    folder: Path,
    number: int,
    rng: random.Random,
    tell: Callable[[str], None],
    *,
    gpus: int = 1,
    most_faults: int = 1_000_000,
) -> list[str]:
    """Submit, break things until all jobs are over, and check."""
    with ServerProcess({"SIMULATED_GPUS": str(gpus), **OFTEN}) as server, UserJobs(folder, server) as user:
        keepers, servers, began = 0, 0, time.monotonic()
        with ThreadPoolExecutor(1) as submitting:
            submitted = submitting.submit(submit_all, user, number)
            while (left := count_left(user)) > 0 or not submitted.done():
                time.sleep(rng.uniform(0, PAUSE_S))
                if submitted.done() and not (folder / "go").exists():
                    tell(f"{left} wait or run; the keeper and its waiting processes take {memory_mb(user):.0f} MB")
                    (folder / "go").touch()
                if keepers + servers >= most_faults:
                    continue
                if rng.random() < 0.7:
                    user.kill_keeper()
                    keepers += 1
                else:
                    server.kill()
                    servers += 1
                    time.sleep(rng.uniform(0, PAUSE_S / 2))
                    server.start()
                user.call("jobs")  # starts the keeper
                tell(f"{left} left, {keepers} keepers and {servers} servers killed, {time.monotonic() - began:.0f} s")
            submitted.result()
        return check(user, number, gpus)


def main() -> int:
    number, seed = int(os.environ.get("JOBS", "200")), int(os.environ.get("SOAK_SEED") or time.time())
    ServerProcess.popen = PreloadedPopen
    folder = Path(tempfile.mkdtemp(prefix="gpu-jobs-"))
    sys.stdout.write(f"seed {seed}, {folder}\n")
    gpus = int(os.environ.get("GPUS", "1"))
    faults = run(folder, number, random.Random(seed), lambda text: print(text, flush=True), gpus=gpus)  # noqa: T201
    sys.stdout.write("".join(f"{fault}\n" for fault in faults) or "each ran once, in order, with its whole log\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
