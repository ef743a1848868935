"""Workers, a server, a bad network between them, and somebody who breaks all three.

`run` starts them, lets the nemesis loose for a while, heals everything, lets the pool go on in calm for longer than the longest
TTL, ends the workers, and returns the history (see gpu_worker_pool/history_check.py). The schedule of the faults, what each
worker wants and what the network does to a request are drawn from the seed; which request meets which fault is up to the
machine, so a seed repeats the weather and not the run. The nemesis waits as part of its schedule, never to let something finish.

The disk fault: RLIMIT_FSIZE of the running server is set to 0, so that every write to a file fails with EFBIG, and put
back. The server's log is such a file, too, and misses what the server said meanwhile. Where libfaketime is installed the wall clock has jumped when
the server comes up again, and jumps back the next time; jumps while it runs are in test_wall_clock.py, because the library
now and then takes a processor for itself when it reads its offset from a file.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_worker_pool.history_check import RunHistory
from gpu_worker_pool.testing import START_S, ServerDidNotStartError, ServerProcess
from tests.e2e import faked_time, histories
from tests.e2e.proxy import Proxy
from tests.e2e.worker import NoAnswer, Orders, now, parse

WORKER = Path(__file__).with_name("worker.py")
PYTHON = (sys.executable, "-I", "-S")
# What the server must keep to when it is well; the TTL of local workers leaves more than that at any time.
NOTICES_WITHIN_S = 2.0
SHARE_MB = 20_000.0
FAILPOINTS = ("before_append", "in_append", "after_append")


@dataclass(frozen=True)
class Plan:
    """How long, and how many. About a second lies between two faults."""

    seed: int
    chaos_s: float = 20.0
    calm_s: float = 7.5
    gpus: int = 4
    badness: float = 0.2

    def roles(self) -> list[Orders]:
        """One of each, without name, port and folder: local and remote, wide and shared, in a hurry and important."""
        base = Orders("", 0, "", seed=self.seed, longest_hold_s=1.2, shortest_hold_s=0.02, ttl_s=4.0)
        # Those from elsewhere: some with a short TTL, and some whose heartbeats are far apart, as they are by default.
        remote = replace(base, is_local=False, ttl_s=2.4, longest_hold_s=1.6)
        slow = replace(base, is_local=False, ttl_s=12.0, longest_wait_s=4.0, shortest_hold_s=2.2, longest_hold_s=3.6)
        return [
            *[base] * 4,
            replace(base, longest_hold_s=3.0),
            replace(base, priority=5),
            replace(base, gpus=2),
            replace(remote, gpus=2),
            remote,
            *[slow] * 2,
            *[replace(base, memory_mb=SHARE_MB)] * 2,
            replace(remote, memory_mb=SHARE_MB, priority=5),
        ]


class Recorder:
    """The nemesis' own history."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "nemesis.history").open("a", encoding="utf-8")
        self.counts: Counter[str] = Counter()

    def say(self, what: str, **facts: object) -> None:
        self.counts[what] += 1
        self._file.write(json.dumps({"what": what, "who": "nemesis", "at": now(), **facts}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Server(ServerProcess):
    """The server, to be killed and started again at the same port and on the same state."""

    def __init__(self, folder: Path, gpus: int) -> None:
        super().__init__(
            {"SIMULATED_GPUS": str(gpus), "REFRESH_INTERVAL": "0.2", "GPU_POOL_NODE": "nemesis"}, folder=folder
        )
        self.usual = (self.command, self.env)
        self.is_well = False
        self.was_unwell_at = 0.0
        self.failpoint: str | None = None

    def unwell(self) -> None:
        self.is_well = False
        self.was_unwell_at = now()

    async def come_up(self, failpoint: str | None = None, wall_clock_off_s: float = 0.0) -> bool:
        """Whether it came up; with a failpoint it may die on the way, and anybody may kill it."""
        self.command, env = self.usual
        self.env = {**env, **({"GPU_POOL_FAILPOINT": failpoint} if failpoint else {})}
        if wall_clock_off_s:
            self.command, self.env = [*faked_time.COMMAND], {**self.env, **faked_time.environment(wall_clock_off_s)}
        gives_up_at = now() + START_S
        self.launch()
        with suppress(ServerDidNotStartError):
            await asyncio.to_thread(self.wait_until_ready)
        assert now() < gives_up_at, "the server did not start, and did not end either"
        self.failpoint, self.is_well = failpoint, self.is_running
        return self.is_well

    def kill(self) -> None:
        self.unwell()
        super().kill()
        faked_time.bury(self.pid)

    def limit_files(self, size: int) -> None:
        hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (size, hard))

    async def look_up(self, path: str, patience_s: float = 3.0) -> tuple[int, dict[str, Any]]:
        """Straight, not through the bad network."""
        try:
            async with asyncio.timeout(patience_s):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                try:
                    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
                    answer = parse(await reader.read())
                finally:
                    writer.transport.abort()
        except (OSError, TimeoutError) as error:
            raise NoAnswer(repr(error)) from error
        if answer is None:
            raise NoAnswer("cut off")
        return answer


class Nemesis:
    """One run."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.random = random.Random(plan.seed)
        self.recorder = Recorder(folder)
        self.server = Server(folder, plan.gpus)
        self.proxy = Proxy(self.server.port, plan.seed)
        self.workers: dict[str, tuple[Orders, subprocess.Popen[bytes]]] = {}
        self.stopped: set[str] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.is_over = False
        self.next_failpoint: str | None = None
        self.next_off_s = 0.0
        self.faults: dict[str, Callable[[], Awaitable[None]]] = {
            "kill_server": self.kill_server,
            "kill_server_at_failpoint": self.kill_server_at_failpoint,
            "stop_server": self.stop_server,
            "fill_disk": self.fill_disk,
            "kill_worker": self.kill_worker,
            "stop_worker": self.stop_worker,
            "cut_network": self.cut_network,
        }
        if faked_time.library() is not None:
            self.faults["jump_wall_clock"] = self.jump_wall_clock
        else:
            self.recorder.say("no_faketime")

    async def run(self) -> None:
        keeper = None
        try:
            assert await self.server.come_up(), "the server did not start"
            await self.proxy.start()
            for role in self.plan.roles():
                self.start_worker(role)
            keeper = asyncio.ensure_future(self.keep_server_up())
            self.proxy.badness = self.plan.badness
            onlooker = asyncio.ensure_future(self.look_on())
            await self.rage()
            onlooker.cancel()
            await self.heal()
            self.recorder.say("calm")
            await asyncio.sleep(self.plan.calm_s)
            await self.end_workers()
            await self.look_at_the_end()
        finally:
            self.is_over = True
            if keeper is not None:
                await keeper
            self.clean_up()
            await self.proxy.stop()
            self.recorder.counts.update(self.proxy.counts)
            self.recorder.close()

    async def rage(self) -> None:
        """Every fault once, in a drawn order, then those of workers more often, as long as there is time."""
        ends_at = now() + self.plan.chaos_s
        to_come, often = list(self.faults), [*self.faults, *["kill_worker"] * 4, *["stop_worker"] * 2]
        self.random.shuffle(to_come)
        while now() < ends_at:
            self.begin(self.faults[to_come.pop() if to_come else self.random.choice(often)]())
            await asyncio.sleep(self.random.uniform(0.6, 1.6))

    def begin(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def heal(self) -> None:
        """All faults run out, and nothing new is done to anybody."""
        self.proxy.badness = 0.0
        await asyncio.gather(*self.tasks)
        if self.server.failpoint or self.next_failpoint:
            self.next_failpoint = None
            self.server.kill()
        await self.until_well()

    async def until_well(self) -> None:
        while not (self.server.is_well and self.server.is_running):  # noqa: ASYNC110 - a process tells nobody
            await asyncio.sleep(0.02)

    # --- the server ------------------------------------------------------------------------------------------------

    async def keep_server_up(self) -> None:
        """As systemd would. It has died by our hand or at a failpoint."""
        while not self.is_over:
            if not self.server.is_running:
                self.server.unwell()
                code = self.server.process.returncode if self.server.process else None
                faked_time.bury(self.server.pid)
                self.recorder.say("server_died", code=code)
                await asyncio.sleep(self.random.choice((0.0, 0.0, 0.5)))
                failpoint, self.next_failpoint = self.next_failpoint, None
                off_s, self.next_off_s = self.next_off_s, 0.0
                await self.server.come_up(failpoint, off_s)
                self.recorder.say("server_started")
            await asyncio.sleep(0.02)

    async def kill_server(self) -> None:
        self.recorder.say("server_killed")
        self.server.kill()

    async def kill_server_at_failpoint(self) -> None:
        """Killed now, and again by itself at a boundary of its journal soon after it has come up."""
        self.next_failpoint = f"{self.random.choice(FAILPOINTS)}:{self.random.randint(2, 40)}"
        self.recorder.say("failpoint_set", failpoint=self.next_failpoint)
        self.server.kill()

    async def stop_server(self) -> None:
        await self.until_well()
        stop_s, pid = self.random.uniform(0.5, 4.5), self.server.pid
        self.recorder.say("server_stopped", for_s=stop_s)
        self.server.unwell()
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(stop_s)
        if self.server.pid == pid and self.server.is_running:
            os.kill(pid, signal.SIGCONT)
            self.recover()
        self.recorder.say("server_continued")

    async def fill_disk(self) -> None:
        await self.until_well()
        pid = self.server.pid
        self.server.unwell()
        self.server.limit_files(0)
        self.recorder.say("disk_filled")
        await asyncio.sleep(self.random.uniform(0.3, 1.8))
        if self.server.pid == pid and self.server.is_running:
            self.server.limit_files(resource.prlimit(pid, resource.RLIMIT_FSIZE)[1])
            self.recover()
        self.recorder.say("disk_freed")

    def recover(self) -> None:
        """It is well from now on; those who look at it allow it a second."""
        self.server.unwell()
        self.server.is_well = True

    async def jump_wall_clock(self) -> None:
        self.next_off_s = self.random.choice((-86400.0, -3600.0, 60.0, 3600.0, 86400.0))
        self.recorder.say("wall_clock_jumped", off_s=self.next_off_s)
        self.server.kill()

    # --- the network -----------------------------------------------------------------------------------------------

    async def cut_network(self) -> None:
        self.recorder.say("network_cut")
        self.proxy.is_cut = True
        self.proxy.cut()
        await asyncio.sleep(self.random.uniform(0.1, 1.5))
        self.proxy.is_cut = False
        self.recorder.say("network_restored")

    async def look_on(self) -> None:
        """Somebody who watches all leases that wait, with curl, and presses Ctrl-C; a client that asks again on a new
        connection before the server sees that its old one is gone does the same. It is nobody else's business.
        """
        while True:
            await asyncio.sleep(self.random.uniform(0.1, 0.5))
            try:
                _, pool = await self.server.look_up("/pool")
            except NoAnswer:
                continue
            watching = [self.server.look_up(f"/leases/{lease['id']}?wait_s=10", 0.2) for lease in pool["queue"]]
            seen = await asyncio.gather(*watching, return_exceptions=True)
            self.recorder.counts["onlooker_hung_up"] += sum(isinstance(answer, NoAnswer) for answer in seen)

    # --- the workers -----------------------------------------------------------------------------------------------

    def start_worker(self, role: Orders) -> None:
        name = f"w{self.recorder.counts['worker_started']}"
        orders = replace(role, name=name, port=self.proxy.port, folder=str(self.folder))
        command = (*PYTHON, str(WORKER), orders.encoded())
        self.workers[name] = (orders, _popen(command, self.folder))
        self.recorder.say("worker_started", worker=name, is_local=orders.is_local)

    def pick_worker(self) -> str | None:
        """One that is not stopped; those who have a GPU are the more interesting ones. What happens to one with a long TTL
        would not be over by the end of a short calm, so it is left alone then.
        """
        too_slow = {name for name, (orders, _) in self.workers.items() if orders.ttl_s > self.plan.calm_s - 2}
        running = sorted(set(self.workers) - self.stopped - too_slow)
        holders = [name for name in running if self.held_by(name) is not None]
        return self.random.choice(holders or running) if running else None

    def held_by(self, name: str) -> str | None:
        """The lease that this worker is about to use, by its history."""
        held = None
        path = self.folder / f"{name}.history"
        for text in path.read_text(encoding="utf-8").splitlines()[-20:] if path.exists() else ():
            line = json.loads(text)
            if line["what"] in {"took", "left"}:
                held = line["lease"] if line["what"] == "took" else None
        return held

    async def kill_worker(self) -> None:
        name = self.pick_worker()
        if name is None:
            return
        orders, process = self.workers.pop(name)
        killed_at = now()
        process.kill()
        process.wait()
        reaped_at = now()
        held = self.held_by(name)
        self.recorder.say("killed", worker=name, at=killed_at, reaped_at=reaped_at, lease=held or "")
        self.start_worker(orders)
        if held is not None and orders.is_local:
            await self.see_death_noticed(held, reaped_at)

    async def see_death_noticed(self, lease: str, died_at: float) -> None:
        """A server that is well all the while, and has been for a second, ends the lease long before its TTL."""
        state = ""
        while (after_s := now() - died_at) < NOTICES_WITHIN_S:
            if not self.server.is_well or not self.server.is_running or died_at - self.server.was_unwell_at < 1.0:
                return
            try:
                status, answer = await self.server.look_up(f"/leases/{lease}")
            except NoAnswer:
                return
            state = answer.get("state", str(status))
            if status == 200 and state in {"ended", "draining"}:
                self.recorder.say("death_noticed", lease=lease, after_s=after_s)
                return
            await asyncio.sleep(0.02)
        self.recorder.say("death_unnoticed", lease=lease, state=state, after_s=after_s)

    async def stop_worker(self) -> None:
        """For longer than its TTL, most of the time."""
        name = self.pick_worker()
        if name is None:
            return
        orders, process = self.workers[name]
        self.stopped.add(name)
        stop_s = orders.ttl_s * self.random.uniform(0.7, 1.3)
        self.recorder.say("worker_stopped", worker=name, for_s=stop_s, lease=self.held_by(name) or "")
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(stop_s)
        process.send_signal(signal.SIGCONT)
        self.recorder.say("worker_continued", worker=name)
        self.stopped.discard(name)

    async def end_workers(self) -> None:
        for _, process in self.workers.values():
            process.terminate()
        for name, (_, process) in self.workers.items():
            code = await asyncio.to_thread(process.wait, 20.0)
            assert code == 0, f"worker {name} ended with {code}: {(self.folder / 'workers.log').read_text()}"
        self.workers.clear()

    async def look_at_the_end(self) -> None:
        """Everybody gave back what he had; only the leases of the dead may run out their TTL, and the calm was longer."""
        state: tuple[list[str], list[str]] = ([], [])
        gives_up_at = now() + 3.0
        while now() < gives_up_at:
            _, pool = await self.server.look_up("/pool")
            left = [f"{lease['id']} is still {lease['state']}" for lease in pool["leases"] + pool["queue"]]
            state = (left, [gpu["state"] for gpu in pool["gpus"]])
            if not state[0] and set(state[1]) == {"free"}:
                break
            await asyncio.sleep(0.05)
        self.recorder.say("final", leases=state[0], gpus=state[1])

    def clean_up(self) -> None:
        for task in self.tasks:
            task.cancel()
        for _, process in self.workers.values():
            process.kill()
            process.wait()
        self.server.close()


def run(plan: Plan, folder: Path) -> tuple[RunHistory, Counter[str]]:
    """A whole run in this empty folder: what happened, and how often what was done."""
    folder.mkdir(parents=True, exist_ok=True)
    nemesis = Nemesis(plan, folder)
    asyncio.run(nemesis.run())
    history = histories.read(folder)
    counts = nemesis.recorder.counts
    counts["grants"] = len(history.tenures)
    counts["renewals"] = sum(line["what"] == "renewed" for line in history.lines)
    counts["calls_without_answer"] = sum(line["what"] == "failed" for line in history.lines)
    counts["gave_up_first"] = sum(line.get("why") == "gave up" for line in history.lines)
    return history, counts


def forget(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _popen(command: tuple[str, ...], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "workers.log").open("ab") as log:
        return subprocess.Popen(command, env={}, cwd=folder, stdout=log, stderr=log)
