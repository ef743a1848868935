"""Carries out one measurement after the other with the package that its interpreter has.

    PYTHON -P benchmarks/beside/agent.py full 64

It reads orders from standard input, one JSON array a line, answers each with a line, and ends when its input ends. It runs under
the base too, so it uses only what both have: the server of gpu_worker_pool.testing, HTTP, the blocking client and the commands.
"""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from gpu_worker_pool import GPUWorkerPool
from gpu_worker_pool.testing import ServerProcess

# Before a hand-over, for the other client to stand in the queue.
QUEUED_S = 0.02
CLIENT = "from gpu_worker_pool import GPUWorkerPoolClient; GPUWorkerPoolClient()"
HOLDER = """
import sys
from gpu_worker_pool import GPUWorkerPool
with GPUWorkerPool(sys.argv[1]) as pool:
    held = pool.request_gpu()
    print(1, flush=True)
    sys.stdin.read()
    pool.release_gpu(held)
"""


class Agent:
    """A server with simulated GPUs, and clients of it."""

    def __init__(self, durability: str, gpus: str) -> None:
        settings = {"GPU_POOL_DURABILITY": durability, "SIMULATED_GPUS": gpus, "REFRESH_INTERVAL": "1"}
        self.server = ServerProcess(settings, command=(sys.executable, "-P", "-m", "gpu_worker_pool.testing"))
        self.server.start()
        self._connection = http.client.HTTPConnection("127.0.0.1", self.server.port)
        self._clients: list[subprocess.Popen[str]] = []

    def leases(self, cycles: int) -> float:
        """Seconds of a request and its release over HTTP, by a bare connection."""
        body = json.dumps({"ttl_s": 60, "wait_s": 5})
        began = time.perf_counter()
        for _ in range(cycles):
            path = f"/leases/{uuid.uuid4()}"
            self._call("PUT", path, body)
            self._call("DELETE", path)
        return (time.perf_counter() - began) / cycles

    def server_cpu(self, cycles: int) -> float:
        """Seconds of processor time that the server takes for such a cycle."""
        before = self._cpu_s()
        self.leases(cycles)
        return (self._cpu_s() - before) / cycles

    def client(self, cycles: int) -> float:
        """Seconds of a request and its release by the blocking Python client."""
        with GPUWorkerPool(self.server.url) as pool:
            pool.release_gpu(pool.request_gpu())
            began = time.perf_counter()
            for _ in range(cycles):
                pool.release_gpu(pool.request_gpu())
            return (time.perf_counter() - began) / cycles

    def hand_over(self, times: int) -> float:
        """Seconds from a release to the next waiter in another process, the median. The server needs one GPU."""
        one, other = self._two_clients()
        _tell(one, "take")
        _hear(one)
        taken: list[float] = []
        for _ in range(times):
            _tell(other, "take")
            time.sleep(QUEUED_S)
            _tell(one, "release")
            began = _hear(one)
            taken.append(_hear(other) - began)
            one, other = other, one
        _tell(one, "release")
        _hear(one)
        return sorted(taken)[len(taken) // 2]

    def killed(self, times: int) -> float:
        """Seconds from `kill -9` of a holder to the next waiter in another process, the median."""
        taken: list[float] = []
        for _ in range(times):
            holder, waiter = self._two_clients()
            _tell(holder, "take")
            _hear(holder)
            _tell(waiter, "take")
            time.sleep(QUEUED_S)
            began = time.monotonic()
            holder.send_signal(signal.SIGKILL)
            taken.append(_hear(waiter) - began)
            _tell(waiter, "release")
            _hear(waiter)
            self._clients.remove(holder)
            holder.wait()
        return sorted(taken)[len(taken) // 2]

    def summary(self, calls: int) -> float:
        """Seconds of `GET /gpu/summary` on one connection."""
        began = time.perf_counter()
        for _ in range(calls):
            self._call("GET", "/gpu/summary")
        return (time.perf_counter() - began) / calls

    def command(self, *words: str) -> float:
        """Seconds of processor time of a command, with its children."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-P", *words],
            env={**os.environ, "GPU_SERVICE_ENDPOINT": self.server.url},
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def import_above_bare(self) -> float:
        """Seconds of a fresh process that imports and makes a client, less those of one that does nothing."""
        return _process_s(CLIENT) - _process_s("pass")

    def memory(self) -> float:
        """The server's proportional share of memory, in megabytes."""
        return _pss_mb(self.server.pid)

    def client_memory(self) -> float:
        """The share of a program that holds a GPU."""
        command = [sys.executable, "-P", "-c", HOLDER, self.server.url]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
            _hear(holder)
            return _pss_mb(holder.pid)

    def close(self) -> None:
        for client in self._clients:
            client.kill()
            client.wait()
        self.server.close()

    def _two_clients(self) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
        while len(self._clients) < 2:
            command = [sys.executable, "-P", __file__, "--client", self.server.url]
            client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._clients.append(client)
            _hear(client)
        return self._clients[0], self._clients[1]

    def _call(self, method: str, path: str, body: str | None = None) -> None:
        self._connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        answer = self._connection.getresponse()
        text = answer.read()
        if answer.status not in (200, 201):
            raise RuntimeError(f"{method} {path} was answered with {answer.status}: {text.decode()}")

    def _cpu_s(self) -> float:
        # In nanoseconds; the file `stat` counts in hundredths of a second.
        tasks = Path(f"/proc/{self.server.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def _process_s(source: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-P", "-c", source], check=True)
    return time.perf_counter() - began


def _pss_mb(pid: int) -> float:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(rollup.partition("\nPss:")[2].split()[0]) / 1000


def _tell(client: subprocess.Popen[str], order: str) -> None:
    assert client.stdin is not None
    client.stdin.write(f"{order}\n")
    client.stdin.flush()


def _hear(client: subprocess.Popen[str]) -> float:
    assert client.stdout is not None
    return float(client.stdout.readline())


def run_client(url: str) -> None:
    """Take and release a GPU as told, and say when: of a release its beginning, of a grant its end."""
    with GPUWorkerPool(url) as pool:
        held = pool.request_gpu()
        pool.release_gpu(held)
        print(time.monotonic(), flush=True)
        for order in sys.stdin:
            if order.strip() == "take":
                held = pool.request_gpu()
                print(time.monotonic(), flush=True)
            else:
                print(time.monotonic(), flush=True)
                pool.release_gpu(held)


def run_agent(durability: str, gpus: str) -> None:
    agent = Agent(durability, gpus)
    try:
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            measure: Callable[..., float] = getattr(agent, name)
            try:
                answer: object = measure(*arguments)
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                answer = {"error": f"{name}: {error}"}
            print(json.dumps(answer), flush=True)
    finally:
        agent.close()


if __name__ == "__main__":
    if sys.argv[1] == "--client":
        run_client(sys.argv[2])
    else:
        run_agent(sys.argv[1], sys.argv[2])
