"""The processes of a contender, as the benchmark sees them: it gives them orders, weighs them, and ends them by pid."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.shared.processes import pss_mb
from gpu_worker_pool.testing import ServerProcess

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ANSWER_S = 60.0
END_S = 15.0
READY_S = 30.0
POLL_S = 0.002


class Client:
    """A process that runs worker.py."""

    def __init__(
        self, kind: str, settings: Mapping[str, Any], python: Sequence[str], env: Mapping[str, str] | None = None
    ) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when it is left
        orders = json.dumps({"kind": kind, "settings": settings})
        # In a group of its own, so that it is ended with all that it has started. Only a fork cannot have a session.
        apart: dict[str, Any] = (
            {"process_group": 0} if list(python) == [sys.executable] else {"start_new_session": True}
        )
        self._process = ServerProcess.popen(
            [*python, "-m", "benchmarks.contenders.worker", orders],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment(env),
            **apart,
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it, with all that it has started."""
        end(self._process)
        self._errors.close()

    def bury(self) -> None:
        """Wait for a process that was killed. Until its parent has done so, it seems to live."""
        self._process.wait(END_S)

    def ask(self, do: str, timeout_s: float = ANSWER_S, **order: Any) -> Any:
        """Give it an order, and wait for the answer."""
        self.tell(do, **order)
        return self.answer(timeout_s)

    def tell(self, do: str, **order: Any) -> None:
        """Give it an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **order}).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        """Return the answer to an order. Raises TimeoutError if that takes too long."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise TimeoutError(f"a client did not answer within {timeout_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").splitlines()
            raise RuntimeError(f"a client has ended: {said[-1] if said else 'it printed no error'}")
        return json.loads(line)


@contextmanager
def running(
    command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None, **options: Any
) -> Iterator[int]:
    """Run a server and yield its pid. In the end, it and all processes that it started are ended."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment(env), start_new_session=True, **options
        )
    try:
        yield process.pid
    finally:
        end(process)


def wait_until(is_ready: Callable[[], bool], log: Path, limit_s: float = READY_S) -> None:
    """Wait until a server is ready. If that takes too long, show its log, and raise RuntimeError with the last line of it: a
    document gets that, and the rest names folders of this machine.
    """
    deadline = time.monotonic() + limit_s
    while not is_ready():
        if time.monotonic() > deadline:
            text = log.read_text(encoding="utf-8", errors="replace").strip()
            print(text[-2000:], file=sys.stderr)
            raise RuntimeError(f"it did not start: {text.rpartition(chr(10))[2][-300:]}")
        time.sleep(POLL_S)


class Daemon:
    """A server that can be killed, and started again with what it has kept."""

    def __init__(
        self, command: Sequence[str], log: Path, is_ready: Callable[[], bool], env: Mapping[str, str] | None = None
    ) -> None:
        self._command = command
        self._log = log
        self._is_ready = is_ready
        self._env = env
        self._running = ExitStack()
        self.pid = 0

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.close()

    def restart(self) -> None:
        """Kill it, start it again, and wait until it is ready."""
        os.kill(self.pid, signal.SIGKILL)
        self._running.close()
        self._start()

    def _start(self) -> None:
        # What an earlier start has written must not seem to be of this one.
        self._log.unlink(missing_ok=True)
        self.pid = self._running.enter_context(running(self._command, self._log, self._env))
        wait_until(self._is_ready, self._log)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process by SIGTERM, then kill what is left of its group, which has only processes that we started."""
    if process.poll() is None:
        process.terminate()
        deadline = time.monotonic() + END_S
        # It is not waited for yet, so that its pid is not used again before the group is killed.
        while time.monotonic() < deadline and not _is_over(process.pid):
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the few variables that a process needs, without any settings of the user."""
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR") if key in os.environ}
    return {**kept, "PYTHONPATH": str(ROOT), **(more or {})}


def memory_mb(pids: Iterable[int]) -> float:
    """Return the memory of these processes and their children. Memory that several share is counted once (PSS)."""
    found = 0.0
    for pid in with_children(set(pids)):
        with suppress(OSError, IndexError):  # it has ended
            found += pss_mb(pid)
    return found


def with_children(pids: set[int]) -> set[int]:
    """Return these processes, and all that they or their children have started."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
    found = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _is_over(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
