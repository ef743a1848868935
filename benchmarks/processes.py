"""Processes of the benchmarks: servers that are ended with all that they started, and children that answer in lines of JSON."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TextIO

from benchmarks.figures import ROOT
from gpu_worker_pool.testing import ServerProcess

ANSWER_S = 60.0
READY_S = 30.0
END_S = 10.0
# Before a hand-over, for the next client to stand in the queue.
QUEUED_S = 0.02


class Child:
    """A program that answers each order, a line of JSON, with another one, and ends when its input ends."""

    def __init__(
        self, command: Sequence[str | Path], env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        # In a group of its own, so that it is ended with all that it has started.
        self._process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment() if env is None else env,
            cwd=cwd,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tell(self, *order: Any) -> None:
        """Give it an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, limit_s: float = ANSWER_S) -> Any:
        """Return its next answer. An answer with an `error` raises RuntimeError."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            raise TimeoutError(f"a process did not answer within {limit_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").splitlines() or ["it printed no error"]
            raise RuntimeError(f"a process has ended with {self._process.wait()}: {said[-1]}")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def ask(self, *order: Any, limit_s: float = ANSWER_S) -> Any:
        """Give it an order, and return the answer."""
        self.tell(*order)
        return self.hear(limit_s)

    def let_end(self) -> None:
        """Close its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End it, with all that it has started."""
        end(self._process)
        self._errors.close()


def orders() -> Iterator[list[Any]]:
    """Yield the orders that this process gets, as a child."""
    for line in sys.stdin:
        yield json.loads(line)


_answers: list[TextIO] = []


def keep_answers_apart() -> None:
    """Let standard output be only for `say`: what libraries and their programs print there goes to standard error."""
    _answers.append(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)


def say(answer: Any) -> None:
    """Answer the process that has started this one."""
    print(json.dumps(answer), file=_answers[0] if _answers else sys.stdout, flush=True)


@contextmanager
def running(command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None) -> Iterator[int]:
    """Run a server, and yield its pid. In the end, it and all processes that it started are ended."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment(env),
            start_new_session=True,
        )
    try:
        yield process.pid
    finally:
        end(process)


def wait_until(is_so: Callable[[], bool], what: str, limit_s: float = READY_S) -> None:
    """Wait until this is so; RuntimeError if that takes too long."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: it did not happen within {limit_s:g} s")
        time.sleep(0.005)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process by SIGTERM, then kill what is left of its group, which has only processes that it started."""
    if process.poll() is None:
        process.terminate()
        deadline = time.monotonic() + END_S
        # It is not waited for yet, so that its pid is not used again before the group is killed.
        while time.monotonic() < deadline and not os.waitid(
            os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
        ):
            time.sleep(0.005)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the few variables that a process needs, without any settings of the user."""
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR") if key in os.environ}
    return {**kept, "PYTHONPATH": str(ROOT), **(more or {})}


def pool_server(
    folder: Path, gpus: str, durability: str = "full", more: Mapping[str, str] | None = None
) -> ServerProcess:
    """Return our server with the GPUs that SIMULATED_GPUS describes. It starts when it is entered."""
    settings = {
        "SIMULATED_GPUS": gpus,
        "REFRESH_INTERVAL": "1",  # the server's default
        "GPU_POOL_STATE_DIR": str(folder),
        "GPU_POOL_DURABILITY": durability,
        "LOG_LEVEL": "warning",
        "ACCESS_LOG": "false",
        **(more or {}),
    }
    return ServerProcess(settings, folder=folder)


def cpu_s(pid: int) -> float:
    """Return the processor time of a process, of all its threads that run."""
    used = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            used += int((task / "schedstat").read_text(encoding="ascii").split()[0]) / 1e9
    return used
