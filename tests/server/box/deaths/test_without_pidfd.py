"""Where there is no pidfd, or too few descriptors for one, deaths are found by polling."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_worker_pool.server.box.deaths import DeathWatch
from tests.server.box.deaths.processes import GENEROUS_S, Reports, Start, not_implemented
from tests.server.running import ROOT

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no /proc here")


class TestWithoutPidfd:
    def test_a_kernel_that_has_none_is_asked_once_for_each_process(
        self, loop: asyncio.AbstractEventLoop, reports: Reports, child: Start
    ) -> None:
        asked: list[int] = []

        def refuse(pid: int) -> int:
            asked.append(pid)
            return not_implemented(pid)

        watch = DeathWatch(reports, loop, open_pidfd=refuse)
        living, other = child(), child()
        watch.watch(living.id, "living")
        watch.watch(other.id, "other")
        other.kill()
        reports.until(1)

        assert asked == [living.id.pid, other.id.pid]
        watch.close()

    @pytest.mark.parametrize("module", ["asyncio", "uvloop"])
    def test_few_descriptors_are_shared_with_connections_and_every_death_is_seen(self, module: str) -> None:
        answer = subprocess.run(
            [sys.executable, "-c", WITH_FEW_DESCRIPTORS, module],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=GENEROUS_S,
        )

        assert answer.stdout.split() == ["polled", "connected", "all", "60"], answer.stderr


# Its 60 processes do not fit into the 40 descriptors it may have.
WITH_FEW_DESCRIPTORS = """
import asyncio, os, resource, signal, socket, subprocess, sys, uvloop
from gpu_worker_pool.core.model.gpu import ProcessId
from gpu_worker_pool.server.box.deaths import DeathWatch
loop = {"asyncio": asyncio, "uvloop": uvloop}[sys.argv[1]].new_event_loop()
children = [subprocess.Popen(["sleep", "60"]) for _ in range(60)]
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
done, reported = asyncio.Event(), []
def report(lease_id):
    reported.append(lease_id)
    if len(reported) == len(children):
        done.set()
watch = DeathWatch(report, loop)
for child in children:
    watch.watch(ProcessId(child.pid), str(child.pid))
if len(watch._polled) not in (0, len(children)):
    print("polled")
with socket.socket(), socket.socket():
    print("connected")
for child in children:
    os.kill(child.pid, signal.SIGKILL)
loop.run_until_complete(asyncio.wait_for(done.wait(), 30))
if sorted(reported) == sorted(str(child.pid) for child in children):
    print("all", len(reported))
for child in children:
    child.wait()
watch.close()
loop.close()
"""
