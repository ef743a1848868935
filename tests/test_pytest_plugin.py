"""The plugin in real runs of pytest, in processes of their own, against a real server with two simulated GPUs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.host.users import user_name
from gpu_worker_pool.testing import ServerProcess
from tests.client.foreign_servers import ForeignServer, statistics
from tests.preloaded import NO_CERTIFICATES, PreloadedPopen
from tests.server.leasing import get, release, take, wait_until_free
from tests.server.running import ROOT

# Nothing here takes so long; a run that hangs must not hang the tests.
MOST_S = 60.0
# Other plugins are left out, so that it is the same whether this one is known to the installation already or not.
PYTEST = (sys.executable, "-m", "pytest", "-p", "gpu_worker_pool.pytest_plugin", "-p", "no:cacheprovider")
OPTIONS = ("--strict-markers", "--strict-config", "-W", "error", "-rA", "--tb=short")
IN_PARALLEL = ("-p", "xdist")
# Found by nobody: a port that needs rights that no test has.
NOBODY = "http://127.0.0.1:1"


# Starts pytest on a program, with more options for pytest; see the fixture `start`.
Start = Callable[..., "subprocess.Popen[str]"]


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code of a run, and what it said."""
    out, _ = process.communicate(timeout=MOST_S)
    return process.returncode, out


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts pytest on a program, in a folder of its own; what is still under way at the end of the test is ended."""
    runs: list[subprocess.Popen[str]] = []

    def start_one(
        program: str,
        *options: str,
        endpoint: str | None = None,
        popen: type[subprocess.Popen[str]] = PreloadedPopen,
        **variables: str,
    ) -> subprocess.Popen[str]:
        folder = tmp_path / f"run-{len(runs)}"
        folder.mkdir()
        (folder / "test_inner.py").write_text(textwrap.dedent(program), encoding="utf-8")
        (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
        own = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "400"}
        pool = {"GPU_SERVICE_ENDPOINT": endpoint} if endpoint else {}
        pipe = subprocess.PIPE
        process = popen(
            [*PYTEST, *OPTIONS, *options],
            cwd=folder,
            env={**kept, **NO_CERTIFICATES, **own, **pool, **variables},
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=subprocess.STDOUT,
            text=True,
        )
        runs.append(process)
        return process

    try:
        yield start_one
    finally:
        for process in runs:
            process.kill()
            process.communicate()


def outcomes(out: str) -> dict[str, str]:
    """Of each test by its name; the last word on it counts."""
    return {name: word for word, name in re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) \S*::(\S+)", out, re.MULTILINE)}


def said_of(out: str, name: str) -> str:
    """The line in the summary."""
    return next(line for line in out.splitlines() if re.match(rf"(FAILED|ERROR) \S*::{name}\b", line))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    env = {"SIMULATED_GPUS": "1xA100-80GB,1xT4", "REFRESH_INTERVAL": "0.05", "GPU_POOL_DURABILITY": "normal"}
    with ServerProcess(env) as running:
        yield running


# --- one process -----------------------------------------------------------------------------------------------------

ONE_PROCESS = """
    import json, os, subprocess, sys, time, urllib.request
    import pytest

    URL = os.environ["GPU_SERVICE_ENDPOINT"]
    os.environ["CUDA_DEVICE_ORDER"] = "FASTEST_FIRST"
    os.environ["GPU_POOL_TTL"] = "2"  # so that a lease that is lost is soon known to be


    def call(path, method="GET"):
        return json.load(urllib.request.urlopen(urllib.request.Request(URL + path, method=method)))


    def active():
        return [lease for lease in call("/pool")["leases"] if lease["state"] == "active"]


    def test_nothing_is_loaded_for_who_wants_no_gpu():
        heavy = {"websockets", "gpu_worker_pool.client", "gpu_worker_pool.errors", "gpu_worker_pool.testing"}
        assert not heavy & sys.modules.keys()


    def test_a_program_sees_the_gpu_and_the_server_shows_the_test(gpu):
        program = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['CUDA_DEVICE_ORDER'])"
        seen = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        assert seen == f"{gpu.gpu_id} PCI_BUS_ID\\n"
        (lease,) = active()
        assert lease["id"] == gpu.lease_id
        this = "test_inner.py::test_a_program_sees_the_gpu_and_the_server_shows_the_test"
        assert lease["labels"] == {"test": this, "command": "pytest"}


    def test_that_fails(gpu):
        os.environ["CUDA_VISIBLE_DEVICES"] = "changed by the test"
        assert gpu is None


    def test_all_is_as_before_after_a_failure():
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
        assert os.environ["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
        assert active() == []


    class TestTheMarker:
        pytestmark = pytest.mark.gpu(model="T4", priority=3)

        def test_of_the_class(self, gpu):
            assert gpu.gpu_ids == (1,)
            assert active()[0]["priority"] == 3

        @pytest.mark.gpu(model="A100", memory_mb=4000)
        def test_of_the_function_wins(self, gpu):
            assert gpu.gpu_ids == (0,)
            assert (active()[0]["memory_mb"], active()[0]["priority"]) == (4000, 3)

        @pytest.mark.gpu(model=None, gpus=2)
        def test_of_several(self, gpu):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


    @pytest.mark.gpu(memory=4000)
    def test_unknown_wish(gpu): ...


    @pytest.mark.gpu(model="H100")
    def test_impossible_wish(gpu): ...


    @pytest.mark.gpu(gpus="two")
    def test_senseless_wish(gpu): ...


    def test_lost(gpu):
        call(f"/admin/leases/{gpu.lease_id}/revoke", "POST")
        while not gpu.is_lost:
            time.sleep(0.01)


    def test_lost_and_fails(gpu):
        test_lost(gpu)
        raise ValueError("of the test itself")


    def test_cuda_begins(gpu, tmp_path_factory):
        # As CUDA does: it opens this device, and never closes it.
        global uvm, first
        uvm, first = (tmp_path_factory.mktemp("dev") / "nvidia-uvm").open("w"), gpu


    def test_cuda_stays_on_its_gpu(gpu):
        assert gpu is first
        assert [lease["id"] for lease in active()] == [first.lease_id]
        assert os.environ["CUDA_VISIBLE_DEVICES"] == str(first.gpu_id)


    @pytest.mark.gpu(gpus=2)
    def test_cuda_cannot_have_another(gpu): ...
"""


def test_in_one_process(server: ServerProcess, start: Start) -> None:
    wait_until_free(server)
    # One of its tests looks at what is loaded.
    code, out = end(start(ONE_PROCESS, endpoint=server.url, popen=subprocess.Popen))

    found = outcomes(out)
    assert code == 1
    assert {name for name, word in found.items() if word != "PASSED"} == {
        "test_that_fails",
        "test_unknown_wish",
        "test_impossible_wish",
        "test_senseless_wish",
        "test_lost",
        "test_lost_and_fails",
        "test_cuda_cannot_have_another",
    }, out
    assert len(found) == 15
    assert "the marker gpu does not know memory; it takes gpus, memory_mb" in said_of(out, "test_unknown_wish")
    # By default what is missing is a failure.
    assert "no GPU for this test: the request was refused" in said_of(out, "test_impossible_wish")
    assert "gpus is 'two'" in said_of(out, "test_senseless_wish")
    # The test itself has failed, not only what came after it.
    assert found["test_lost"] == "FAILED"
    assert f"was lost during the test: it was revoked by {user_name()}" in said_of(out, "test_lost")
    assert "ValueError: of the test itself" in said_of(out, "test_lost_and_fails")
    assert out.count("was lost during the test") == 3, out  # twice of the first, and beside the ValueError
    said = said_of(out, "test_cuda_cannot_have_another")
    assert re.search("has initialized CUDA on GPU [01] and cannot leave it, but .* gpus=2", said), said
    assert [lease for lease in server.json("/pool")["leases"] if lease["state"] == "active"] == []


# --- several processes -----------------------------------------------------------------------------------------------

CROWD = """
    import json, os, time
    from pathlib import Path
    import pytest


    @pytest.mark.parametrize("number", range(9))
    def test_work(gpu, number):
        began = time.monotonic()
        time.sleep(0.04)  # the work
        line = {"gpu": os.environ["CUDA_VISIBLE_DEVICES"], "began": began, "ended": time.monotonic(), "pid": os.getpid()}
        with Path("worked").open("a") as file:
            file.write(json.dumps(line) + "\\n")
"""


def test_processes_never_have_the_same_gpu_at_once(server: ServerProcess, start: Start, tmp_path: Path) -> None:
    wait_until_free(server)
    code, out = end(start(CROWD, *IN_PARALLEL, "-n", "3", endpoint=server.url))

    assert code == 0, out
    worked: list[dict[str, Any]] = [
        json.loads(line) for line in (tmp_path / "run-0" / "worked").read_text().splitlines()
    ]
    assert len(worked) == 9
    assert {line["gpu"] for line in worked} == {"0", "1"}
    assert len({line["pid"] for line in worked}) == 3
    for gpu in ("0", "1"):
        in_order = sorted((line for line in worked if line["gpu"] == gpu), key=itemgetter("began"))
        assert all(one["ended"] <= next_one["began"] for one, next_one in pairwise(in_order)), in_order


USES_IT = """
    def test_it(gpu):
        assert gpu.gpu_id in (0, 1)
"""


# As where a look at what is available decides which tests there are.
BEGAN_TOO_EARLY = """
    import tempfile
    from pathlib import Path

    folder = tempfile.TemporaryDirectory()
    uvm = (Path(folder.name) / "nvidia-uvm").open("w")


    def test_it(gpu):
        assert gpu.gpu_id in (0, 1)


    def test_it_again(gpu):
        uvm.close()
        folder.cleanup()
"""


def test_without_leases_only_one_process_is_possible(start: Start) -> None:
    with ForeignServer(statistics(2)) as old:
        several = start(USES_IT, *IN_PARALLEL, "-n", "2", "--gpu-endpoint", old.url)
        code, out = end(start(BEGAN_TOO_EARLY, "-W", "default", "--gpu-endpoint", old.url))
        assert (code, outcomes(out)) == (0, {"test_it": "PASSED", "test_it_again": "PASSED"}), out
        assert out.count("CUDA was initialized in this process before a test had a GPU") == 1, out

        code, out = end(several)
    assert (code, outcomes(out)) == (1, {"test_it": "ERROR"}), out
    assert re.search(r"has statistics only and no leases.* these run in 2", out), out


# --- where there is no GPU -------------------------------------------------------------------------------------------


def test_a_missing_gpu_may_skip_a_test_but_not_a_busy_one(server: ServerProcess, start: Start) -> None:
    wait_until_free(server)
    held = take(server, gpus=2, owner="ada", ttl_s=60)
    options = ("--gpu-missing=skip", "-o", "gpu_timeout=0.2")
    busy = start(USES_IT, *options, endpoint=server.url)
    code, out = end(start(USES_IT, *options, endpoint=NOBODY))
    assert code == 0, out
    assert re.search(r"^SKIPPED .*no GPU for this test: no GPU server is available: 127", out, re.MULTILINE), out

    # That somebody else has it does not make it missing.
    code, out = end(busy)
    assert (code, outcomes(out)) == (1, {"test_it": "ERROR"}), out
    assert re.search(r"no GPU was granted within 0\.2.*leased by ada", said_of(out, "test_it")), out
    release(server, held["id"])


SEES_ONE = """
    import os

    import pytest


    def test_it(gpu):
        assert gpu.gpu_ids == (1,)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


    def test_it_again(gpu):
        assert gpu.gpu_ids == (1,)


    @pytest.mark.gpu(gpus=2)
    def test_more_than_is_seen(gpu): ...
"""


def test_only_gpus_that_the_caller_sees_are_leased(server: ServerProcess, start: Start) -> None:
    wait_until_free(server)
    hidden = start(USES_IT, "--gpu-missing=skip", endpoint=server.url, CUDA_VISIBLE_DEVICES="-1,0")
    code, out = end(start(SEES_ONE, endpoint=server.url, CUDA_VISIBLE_DEVICES="1,what,-1,0"))
    assert (code, outcomes(out)) == (
        1,
        {"test_it": "PASSED", "test_it_again": "PASSED", "test_more_than_is_seen": "ERROR"},
    ), out
    assert "CUDA_VISIBLE_DEVICES='1,what,-1,0' allows no others" in said_of(out, "test_more_than_is_seen")

    # As in a `gpu-pool run` at a server without leases: what it sees is held by what is around it, and never comes free.
    code, out = end(start(USES_IT, endpoint=server.url, CUDA_VISIBLE_DEVICES="1", GPU_POOL_LEASE_ID="held-around-it"))
    assert code == 1
    assert "pytest runs inside `gpu-pool run`" in out

    code, out = end(hidden)
    assert code == 0, out
    assert re.search(r"^SKIPPED .*CUDA_VISIBLE_DEVICES='-1,0' hides every GPU; unset it", out, re.MULTILINE), out


INTERRUPTED = """
    import os, signal
    from pathlib import Path

    def test_it(gpu):
        Path("lease").write_text(gpu.lease_id)
        os.kill(os.getpid(), signal.SIGINT)
"""


def test_an_interrupted_test_gives_its_gpu_back(server: ServerProcess, start: Start, tmp_path: Path) -> None:
    wait_until_free(server)
    code, out = end(start(INTERRUPTED, endpoint=server.url))
    assert code == pytest.ExitCode.INTERRUPTED, out
    # By itself: it was not the server that saw its process die.
    lease = get(server, (tmp_path / "run-0" / "lease").read_text())
    assert lease["end_reason"] == "released"


USES_A_SERVER = """
    from pathlib import Path

    from gpu_worker_pool import GPUWorkerPool


    def test_a_lease(gpu_pool_server):
        with GPUWorkerPool(gpu_pool_server.url) as pool, pool.gpu(timeout=30) as assignment:
            assert assignment.gpu_id in range(4)
        Path("pid").write_text(str(gpu_pool_server.pid))


    def test_the_same_server(gpu_pool_server):
        assert gpu_pool_server.pid == int(Path("pid").read_text())
        assert gpu_pool_server.json("/pool")["source"] == "simulated"
"""


def test_a_server_of_its_own_for_tests(start: Start, tmp_path: Path) -> None:
    code, out = end(start(USES_A_SERVER))
    assert (code, outcomes(out)) == (0, {"test_a_lease": "PASSED", "test_the_same_server": "PASSED"}), out
    pid = (tmp_path / "run-0" / "pid").read_text()
    assert not Path("/proc", pid).exists(), "the server outlived the tests"
