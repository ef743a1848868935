"""`gpu-pool demo`: starts a pool and its workers, lets them compete, kills one of them and the server, and ends everything."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final

from gpu_worker_pool.cli.declare import Option
from gpu_worker_pool.failure import SIGNAL_BASE, Failure
from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.testing import ServerDidNotStartError, ServerProcess, inherited_environment

from .results import Course, Outage, show_results

SERVER_SETTINGS: Final = {"REFRESH_INTERVAL": "0.5", "ACCESS_LOG": "false"}
# When to kill the worker and the server, as a part of the time; the next good moment is used.
_WORKER_DIES: Final = 0.3
_SERVER_DIES: Final = 0.5
_WORKERS: Final = 12
_GPUS: Final = 4
_STARTING_S: Final = 20.0
_FINISHING_S: Final = 8.0
_NOTICING_S: Final = 2.0


def demo(
    seconds: Annotated[float, Option(metavar="NUMBER", min=3, max=600, help="How long they compete.")] = 14.0,
) -> int:
    """See the pool at work: workers compete for GPUs, one of them is killed, and so is the server.

    It has its own server, port and journal, so it disturbs no other pool. It needs no GPU, and ends by
    itself. All results are measured; the exit code is 1 if a promise was broken.
    """

    def stop(number: int, _: Any) -> None:
        sys.exit(SIGNAL_BASE + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # by nohup, for example
            signal.signal(number, stop)
    with tempfile.TemporaryDirectory(prefix="gpu-pool-demo-", ignore_cleanup_errors=True) as folder:
        course = Demo(Path(folder), _GPUS, say).run(_WORKERS, seconds)
    return show_results(course, say)


def say(text: str) -> None:
    """Print what happens, at once."""
    print(text, flush=True)  # noqa: T201 - the result


class Demo:
    """One run on one server. `say` prints what happens."""

    def __init__(self, folder: Path, gpus: int, say: Callable[[str], None]) -> None:
        self.folder, self.gpus, self.say = folder, gpus, say
        self.course = Course()
        self._changed = threading.Condition()

    def run(self, workers: int, seconds: float) -> Course:
        """Run the demo; Failure if it cannot run."""
        names = [f"w{number:02}" for number in range(1, workers + 1)]
        try:
            with self.servers() as endpoints:
                with self._workers(names, endpoints) as process:
                    ends_at = boot_time() + seconds
                    time.sleep(_WORKER_DIES * seconds)
                    self._kill_worker(ends_at)
                    time.sleep(max(ends_at - (1 - _SERVER_DIES) * seconds - boot_time(), 0.0))
                    self.break_servers(ends_at)
                    time.sleep(max(ends_at - boot_time(), 0.0))
                    self.say("no new requests; the waiters are still served")
                    process.stdin.close()  # type: ignore[union-attr]
                    self.until(lambda: len(self.course.ended) >= workers, _FINISHING_S)
                self._look_at_the_end()
        except ServerDidNotStartError as error:
            raise Failure(f"the server of the demo did not start: {_last_line(str(error))}", 1) from None
        return self.course

    @contextmanager
    def servers(self) -> Iterator[list[str]]:
        """What the workers will ask, by its URLs."""
        self._server = ServerProcess(SERVER_SETTINGS | {"SIMULATED_GPUS": str(self.gpus)}, folder=self.folder)
        with self._server:
            self.say(f"a server with {self.gpus} simulated GPUs is on {self._server.url}")
            yield [self._server.url]

    def break_servers(self, ends_at: float) -> None:
        """Kill the server, and start it again."""
        self.await_holders(ends_at)
        outage = Outage("server", boot_time())
        self._server.kill()
        self.say(f"kill -9 of the server (pid {self._server.pid}), with all leases")
        self._server.restart()
        self.note_back(outage, "the server is back")

    def ask(self, path: str) -> Any:
        """What the server answers; None where it does not."""
        with suppress(OSError, http.client.HTTPException):
            answer = self._server.ask(path)
            return answer.json if answer.status == 200 else None

    def note_back(self, outage: Outage, words: str) -> None:
        """Record an outage that is over, and what has become of the leases that were there."""
        outage.back_at = boot_time()
        self.say(f"{words} after {outage.back_at - outage.killed_at:.1f} s")
        with self._changed:
            held, waiting = self.course.open_at(outage.killed_at)
        outage.answers = {turn.id: self.ask(f"/leases/{turn.id}") or {} for turn in (*held, *waiting)}
        self.course.outages.append(outage)

    @contextmanager
    def _workers(self, names: list[str], endpoints: list[str]) -> Iterator[subprocess.Popen[bytes]]:
        """The workers, ready to ask. They end with this process, however it ends."""
        settings = [names, os.getpid(), endpoints, str(self.folder)]
        command = [sys.executable, "-m", "gpu_worker_pool.cli.demo.worker", json.dumps(settings)]
        env, log_file = inherited_environment(os.environ), self.folder / "workers.log"
        with log_file.open("wb") as log:
            streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            # In a group of its own: Ctrl-C is for the demo, which then ends the workers.
            process = subprocess.Popen(command, env=env, cwd=self.folder, process_group=0, **streams)  # noqa: S603
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        try:
            if not self.until(lambda: len(self.course.pids) == len(names), _STARTING_S):
                why = _last_line(log_file.read_text(encoding="utf-8", errors="replace"))
                raise Failure(f"the workers of the demo did not start: {why}", 1)
            self.say(f"{len(names)} workers ask for GPUs")
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        for text in process.stdout or ():
            line = json.loads(text)
            with self._changed:
                turn = self.course.add(line)
                self._changed.notify_all()
            if line["what"] == "took":
                waited_s = turn.took_at - turn.asked_at
                self.say(f"{turn.who} holds GPU {turn.gpu} (fence {turn.fence}) after {waited_s:.2f} s")

    def _kill_worker(self, ends_at: float) -> None:
        def kill() -> bool:
            held, waiting = self.course.open_at(boot_time())
            victims = [turn for turn in held if turn.due_at > boot_time() + 0.2]
            if not victims or not waiting:
                return False
            victim = victims[0]
            os.kill(self.course.pids[victim.who], signal.SIGKILL)
            victim.killed_at = boot_time()
            self.course.ended.add(victim.who)
            self.say(f"kill -9 of {victim.who}, which holds GPU {victim.gpu}")
            return True

        self.until(kill, ends_at - boot_time())

    def await_holders(self, ends_at: float) -> None:
        """Wait until GPUs are held for a while, so that there is something to keep."""

        def are_some() -> bool:
            held, _ = self.course.open_at(boot_time())
            return sum(turn.due_at > boot_time() + 0.5 for turn in held) >= min(2, self.gpus)

        self.until(are_some, (ends_at - boot_time()) / 2)

    def until(self, is_so: Callable[[], bool], limit_s: float) -> bool:
        """Wait until this holds, as the workers' lines show it; whether it does."""
        with self._changed:
            return self._changed.wait_for(is_so, max(limit_s, 0.0))

    def _look_at_the_end(self) -> None:
        """Record the leases that are left once the server has noticed that all workers are gone."""
        until = boot_time() + _NOTICING_S
        while pool := self.ask("/pool"):
            live = [lease for lease in (*pool["leases"], *pool["queue"]) if lease["state"] != "draining"]
            self.course.left_over = [f"{lease['id']} is still {lease['state']}" for lease in live]
            if not live or boot_time() >= until:
                return
            time.sleep(0.1)


def _last_line(log: str) -> str:
    text = next((line for line in reversed(log.splitlines()) if line.strip()), "its log is empty")
    return f"{text}; pip install 'gpu-worker-pool[all]'" if "No module named" in text else text
