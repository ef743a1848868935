"""The examples run as the documents say, each in a process of its own, and what they print is so."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.client.foreign_servers import ForeignServer, statistics
from tests.preloaded import NO_CERTIFICATES
from tests.server.leasing import eventually
from tests.server.running import ROOT

# Nothing here takes so long; an example that hangs must not hang the tests.
MOST_S = 90.0
# A port that needs rights that no test has.
NOBODY = "http://127.0.0.1:1"
OWN_SERVERS = r"Started with simulated GPUs, for this example only: http://127\.0\.0\.1:\d+"

# What each prints, in this order, whatever stands between.
PRINTED: dict[str, list[str]] = {
    "examples/basic_client_usage.py": [
        OWN_SERVERS,
        r"GPU [01] is ours since",
        r"the training failed .*, and the GPU is given back",
        r"GPUs \(0, 1\); .*'CUDA_VISIBLE_DEVICES': '0,1'",
        r"4000 MB each, on the GPUs [01], [01], [01]\n",
        r"WorkerTimeoutError: no GPU was granted within 1.*2 leased by",
        r"Position \d of \d, waiting for 1 GPU(.*\n)*?  worker [1-5] works on GPU [01]\n",
        r"working on GPU ([01]), and an operator takes it away\n  on_lost: GPU \1\n",
        r"await assignment\.lost: it was revoked by \S+\n  StaleAssignmentError: ",
        r"the program sees CUDA_VISIBLE_DEVICES = [01]\n  given back\n$",
    ],
    "examples/multi_endpoint_usage.py": [
        OWN_SERVERS,
        r"  round_robin  \d by \S+, \d by ",
        r"  weighted     \d by \S+",
        r"127\.0\.0\.1-(\d+):(\d) is GPU \2 of 127\.0\.0\.1-\1\n",
        r"2 of 2 servers, 6 GPUs\n",
        r"Degradation Status: Partial \(1/2 endpoints healthy\)\n",
        r"asked now, (\S+) answered: True; the request has got \1:\d\n",
        r"Degradation Status: None \(2/2 endpoints healthy\)\n",
    ],
    "examples/multi_endpoint_demo.py": [
        r"gpu-1:0, gpu-2:0, gpu-3:0\n",
        r"localhost-8000:0, localhost-8001:0\n",
        r"  availability small 10 times\n  round_robin  large 5 times, small 5 times\n  weighted     large 8 times, small 2 times\n",
    ],
    "examples/config_examples.py": [
        r"one server: localhost at http://localhost:8000",
        r"several servers: gpu-2 at \S+, gpu-3 at \S+; strategy round_robin\n",
        r"    ERROR: GPU_MEMORY_THRESHOLD_PERCENT is 'a lot'; it must be a number from 0 to 100; using the default 80\n",
        r"  <GPUWorkerPoolClient: of-the-constructor; stopped>\n",
        r"ValueError: memory_threshold is 120; it must be a number from 0 to 100\n",
        r"ValueError: token: entry 1",
    ],
}


# As somebody who has a server of his own runs it, and has installed the package.
ON_MY_SERVER = [
    r"Using your GPU server: http://127\.0\.0\.1:\d+\n",
    r"GPUs \((\d), (\d)\); .*'CUDA_VISIBLE_DEVICES': '\1,\2'",
    r"Left out on a server that others use: taking all GPUs, and taking one away from its holder\.\n",
    r"the program sees CUDA_VISIBLE_DEVICES = \d\n  given back\n",
    r"exit code 0, held: \[\], port \d+\n$",
]
SOME_FAIL = [
    r"Using your GPU server: http://127\.0\.0\.1:\d+\n",
    r"basic_client_usage: the request was refused: .* this pool has no GPU",
    r"example +took  result\n",
    r"basic_client_usage +[\d.]+ s  failed: exit code 1\n",
    r"config_examples +[\d.]+ s  ok\n$",
]


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=kept | NO_CERTIFICATES | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=MOST_S,
        check=False,
    )


def assert_printed(text: str, parts: list[str]) -> None:
    """One after the other, with anything between."""
    rest = text
    for part in parts:
        found = re.search(part, rest)
        assert found, f"{part}\nis not in\n{rest}\nof\n{text}"
        rest = rest[found.end() :]


# A server that is there already, on which an example is run; then its owner ends in a way that leaves no block.
MY_SERVER = """
import os, signal, subprocess, sys
sys.path.insert(0, "examples")
from example_servers import example_servers
with example_servers("4") as (server,):
    env = {**os.environ, "GPU_SERVICE_ENDPOINT": server.url}
    del env["PYTHONPATH"]
    code = subprocess.run([sys.executable, "examples/basic_client_usage.py"], env=env).returncode
    held = [lease for lease in server.json("/pool")["leases"] if lease["state"] == "active"]
    print(f"exit code {code}, held: {held}, port {server.port}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_every_example_prints_what_it_is_to_show() -> None:
    with ForeignServer(statistics(gpus=0)) as empty, ThreadPoolExecutor() as together:
        mine = together.submit(run, "-c", MY_SERVER, PYTHONPATH=".")
        others = {name: together.submit(run, name, PYTHONPATH=".") for name in PRINTED}
        failing = ("basic_client_usage", "config_examples", "--endpoint", empty.url)
        some_fail = together.submit(run, "run_examples.py", *failing)
        nobody = [
            together.submit(run, "run_examples.py", GPU_SERVICE_ENDPOINT=NOBODY),
            together.submit(run, "examples/basic_client_usage.py", PYTHONPATH=".", GPU_SERVICE_ENDPOINT=NOBODY),
        ]

    for name, done in others.items():
        assert_printed(done.result().stdout, PRINTED[name])
        assert (name, done.result().returncode) == (name, 0)
    assert "a-secret-token" not in others["examples/config_examples.py"].result().stdout
    assert_printed(some_fail.result().stdout, SOME_FAIL)
    assert some_fail.result().returncode == 1
    for example, done in zip(("run_examples", "basic_client_usage"), nobody, strict=True):
        # At once, and before anything was tried.
        said = f"{example}: your GPU server cannot be used \\({NOBODY}: .*unset GPU_SERVICE_ENDPOINT, and .*\n$"
        assert re.fullmatch(said, done.result().stdout), done.result().stdout
        assert done.result().returncode == 1
    assert_printed(mine.result().stdout, ON_MY_SERVER)
    assert_has_ended(port=int(mine.result().stdout.rsplit(" ", 1)[1]))


def assert_has_ended(port: int) -> None:
    """An example's server does not outlive it, however that ended."""

    def is_gone() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            return True
        return False

    eventually(is_gone, "the server has ended")


def test_the_runner_knows_every_example() -> None:
    listed = run("run_examples.py", "--list").stdout
    there = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"conftest", "example_servers", "fleet_demo"}
    assert {line.split()[0] for line in listed.splitlines()} == there
    assert all(len(line.split()) > 4 for line in listed.splitlines()), listed
