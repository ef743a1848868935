"""Ray with many nodes on one machine, as its own tests start them: `ray.cluster_utils.Cluster`, in a network namespace.

As a program it runs with the interpreter of the peers, in that namespace. It adds nodes until there are enough or until
its time is over, says how many there are, and keeps them until it is ended.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.contenders import namespaces
from benchmarks.contenders.processes import wait_until, with_children
from benchmarks.contenders.servers import RAY_ENV, RAY_OBJECT_STORE_BYTES, Serving
from benchmarks.fleet.gpus import GPUS_A_BOX, RARE

ENV = {**RAY_ENV, "RAY_USAGE_STATS_ENABLED": "0"}
SAYS = "NODES "
# Beyond the time for the nodes: the import of Ray, and its head.
BEGINS_S = 60.0


@dataclass(frozen=True)
class RayNodes:
    """Nodes of Ray that run. The processes of the head are those that its death would end."""

    serving: Serving
    nodes: int
    head: frozenset[int]

    def kill_head(self) -> None:
        for pid in with_children(set(self.head)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def running(folder: Path, nodes: int, limit_s: float) -> Iterator[RayNodes]:
    """Run a head and as many other nodes as come up in this time. One of them has the rare GPU."""
    python = peers.python_with("ray")
    log = folder / "ray-log"
    # Its sockets have long names, and the path of a socket must not be longer than 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as name:
        # It writes its address into this folder, which it does not make.
        (Path(name) / "ray").mkdir()
        env = {**ENV, "RAY_TMPDIR": name}
        program = [str(python), "-m", "benchmarks.fleet.ray_nodes", json.dumps([nodes, limit_s, name])]
        with namespaces.running_alone(program, log, env) as (pid, joined):
            wait_until(lambda: SAYS in _text(log), log, limit_s + BEGINS_S)
            told = json.loads(_text(log).partition(SAYS)[2].splitlines()[0])
            settings = {"address": told["address"], "folder": name}
            pids = sorted(with_children({pid}) - {pid})
            serving = Serving(settings, told["ready_s"], pids, [*joined, str(python)], env)
            yield RayNodes(serving, told["nodes"], frozenset(told["head"]))


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


def main(nodes: int, limit_s: float, folder: str) -> None:
    cluster: Any = importlib.import_module("ray.cluster_utils").Cluster()
    # Ray starts no more processes at a time than there are CPUs, so a grant must not wait for the number of processors.
    each = {"num_gpus": GPUS_A_BOX, "num_cpus": GPUS_A_BOX, "object_store_memory": RAY_OBJECT_STORE_BYTES}
    began = time.monotonic()
    head = cluster.add_node(**each, include_dashboard=False, temp_dir=folder)
    cluster.add_node(**{**each, "num_gpus": 1}, resources={RARE: 1})
    added = 2
    while added < nodes and time.monotonic() - began < limit_s:
        cluster.add_node(**each, wait=False)
        added += 1
    cluster.wait_for_nodes()
    pids = [one.process.pid for some in head.all_processes.values() for one in some]
    told = {"address": cluster.address, "nodes": added, "ready_s": time.monotonic() - began, "head": pids}
    print(f"\n{SAYS}{json.dumps(told)}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
